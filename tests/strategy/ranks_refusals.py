"""Modules and settings that are refused; each function gives the messages."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, Data, Stage
from ranks_reductions import Batches
from scenario import quiet, trainer_of
from torch import Tensor, nn

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.pipeline_mixin import PipelineMixin
from lightning_3d.strategy import ThreeDStrategy

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 16}


def llama(stage_layers: list[int] | None = None, **sizes: Any) -> LlamaModule:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    return LlamaModule(LlamaConfig(**{**SIZES, **heads, **sizes}), stage_layers=stage_layers)


class Plain(pl.LightningModule):
    """No pipeline, no parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0].float()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class NoLoss(PipelineMixin, pl.LightningModule):
    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        return nn.Linear(2, 2)


class NoPlan(GPT):
    tensor_parallel_plan = ()


class NoContext(GPT):
    apply_context_parallel = PipelineMixin.apply_context_parallel


class Lengths(pl.LightningDataModule):
    def __init__(self, sequence_length: int, accumulation: int | None = None) -> None:
        super().__init__()
        self.sequence_length, self.batch_accumulation_per_replica = sequence_length, accumulation

    def train_dataloader(self) -> Any:
        return []


class Scale(nn.Module):
    """Owns a parameter and does not say how to draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))


class Undrawn(GPT):
    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        stage = super().build_stage(index, num_stages)
        stage.scale = Scale()
        return stage


class Padded(GPT):
    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        stage = super().build_stage(index, num_stages)
        if index == 0:
            stage.wpe = nn.Embedding(12, 8, padding_idx=3)
        return stage


class LocalNames(GPT):
    """Numbers the layers of each stage from 0."""

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        return Stage(range(4 // num_stages), first=index == 0, last=index == num_stages - 1)


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def strategies() -> list[str]:
    """Settings that no strategy can be made of; types are not checked on the way, as in a user's script."""
    quiet()
    options: list[dict[str, Any]] = [
        {"pp_engine": "zigzag"},
        {"data_parallel": "zero3"},
        {"data_parallel": "hsdp"},
        {"dp_replicate": 2},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 2, "pp_engine": "interleaved_1f1b"},
        {"pp": 2, "pp_engine": "zbv", "virtual_stages": 3},
        {"pp_engine": "looped_bfs", "virtual_stages": 2},
        {"pp": 4, "batch_accumulation_per_replica": 2},
        {"pp": 2, "pp_engine": "interleaved_1f1b", "virtual_stages": 2, "batch_accumulation_per_replica": 5},
        {"pp": 2, "pp_engine": "dualpipe_v", "virtual_stages": 2, "batch_accumulation_per_replica": 3},
        {"cp": 2, "cp_method": "zigzag"},
        {"cp_method": "ulysses"},
        {"pp": 2, "pp_engine": "zbv", "virtual_stages": 2, "recompute": "selective"},
        {"pp": 2, "pp_engine": "zero_bubble", "compile": True},
    ]
    return [message(lambda given=given: ThreeDStrategy(**given)) for given in options]


def built(module: Callable[..., Any], layout: tuple[int, int, int], strategy: dict[str, Any]) -> str:
    """What is found out when the stages are built."""
    quiet()
    case = Case(layout, module, strategy)
    return message(lambda: trainer_for(case).fit(module(), datamodule=Data()))


def other_trainers() -> list[str]:
    """One module under two Trainers whose weights would lie elsewhere."""
    quiet()
    results = []
    for first, second in (((1, 1, 2), (2, 1, 1)), ((1, 1, 2), None), (None, (1, 1, 2)), ((1, 1, 2), (1, 1, 2))):
        module = GPT()
        trainer_or_alone(first).fit(module, Batches([]))
        results.append(message(lambda second=second, module=module: trainer_or_alone(second).fit(module, Batches([]))))
    return results


def trainer_or_alone(layout: tuple[int, int, int] | None) -> Any:
    """Under None each rank trains alone."""
    if layout is not None:
        return trainer_for(Case(layout, trainer={"max_steps": 1}))
    return trainer_of(pl.strategies.SingleDeviceStrategy("cpu"), 1, max_steps=1)
