"""A small Llama's training with compiled blocks, on each rank: what it saw, and what torch compiled."""

from dataclasses import dataclass, field
from typing import Any

import torch
from ranks_fit import Case, Record, full, trainer_for
from scenario import quiet
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW


@dataclass(frozen=True)
class Compiled:
    """A layout, and what is particular to it."""

    layout: tuple[int, int, int]
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None  # float64
    documents: bool = False
    sequences: tuple[int, ...] = (16, 16)

    @property
    def world_size(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp * self.strategy.get("cp", 1)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return "-".join(map(str, (*self.layout, *self.strategy.values(), *filter(None, [self.precision]))))


def batch_of(case: Compiled, sequence: int, seed: int) -> dict[str, Tensor]:
    """Documents begin elsewhere in each batch."""
    ids = torch.randint(0, 61, (4, sequence + 1), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if case.documents:
        positions = torch.arange(sequence).expand(4, -1).clone()
        positions[:, 3 + seed :] -= 3 + seed
        batch["position_ids"] = positions
    return batch


def fit(case: Compiled, mode: Any) -> dict[str, Any]:
    """Two epochs with validation; gives also the number of graphs and the reasons of graph breaks."""
    quiet()
    torch._dynamo.reset()
    counters.clear()
    torch.set_default_dtype(torch.float32 if case.precision else torch.float64)
    config = LlamaConfig(61, 32, 48, 4, 4, 2, max_position_embeddings=32, initializer_range=0.2)
    record = Record()
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "precision": case.precision}
    trainer = trainer_for(Case(case.layout, strategy={**case.strategy, "compile": mode}, trainer=options), record)
    module = LlamaModule(config, AdamW(learning_rate=1e-3))
    batches: Any = DataLoader([batch_of(case, length, seed) for seed, length in enumerate(case.sequences)], batch_size=None)
    trainer.fit(module, batches, batches)
    seen = record.seen | {"weights": full(dict(module.named_parameters())), "val": float(trainer.callback_metrics["val_lm_loss"])}
    return seen | {"graphs": counters["stats"]["unique_graphs"], "breaks": list(counters["graph_break"])}
