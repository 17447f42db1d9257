"""The weights that stages start from, by layout."""

from typing import Any

import torch
from ranks_fit import full
from ranks_gpt import GPT
from scenario import quiet
from torch import Tensor, nn

from lightning_3d.mesh import Mesh, ParallelDims
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.parallel.stages import Layout, Stages
from lightning_3d.seeding import materialise

LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    attention_bias=True,
    tie_word_embeddings=True,
)


def modules() -> dict[str, Any]:
    return {"gpt": GPT(), "llama": LlamaModule(LLAMA)}


def whole(name: str) -> dict[str, Tensor]:
    """Drawn in one process, without any layout."""
    module = modules()[name]
    with torch.device("meta"):
        stage = module.build_stage(0, 1)
    materialise(stage, module.init_seed, torch.device("cpu"))
    return {key: parameter.detach() for key, parameter in stage.named_parameters()}


def start(dims: dict[str, int], options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """What both modules start from in the layout, put together from all shards."""
    quiet()
    torch.manual_seed(torch.distributed.get_rank())  # of no consequence
    layout = Layout(ParallelDims(**dims), **options)
    mesh, weights = Mesh.build(layout.dims, "cpu"), {}
    for name, module in modules().items():
        stages = Stages.build(module, mesh, torch.device("cpu"), layout)
        weights[name] = full({f"stages.0.{key}": parameter for key, parameter in stages.parameters().items()})
    return weights


class Shared(nn.Module):
    """Two modules of one weight, and one that draws a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
