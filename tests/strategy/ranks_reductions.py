"""Metrics, reductions, samplers, seeds and batches, as each rank sees them."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, ROWS, VOCAB, Data, sequences
from scenario import quiet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh, ParallelDims
from lightning_3d.parallel.guard import BatchGuard


class Counting(GPT):
    """Counts samples with torchmetrics, logged as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.mean = SumMetric(), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples.update(len(batch[0]))
        self.mean.update(batch[0].double())
        self.log("samples", self.samples)
        self.log("mean", self.mean)


def counted(case: Case) -> dict[str, float]:
    quiet()
    trainer = trainer_for(case)
    (metrics,) = trainer.validate(case.module(), datamodule=Data(val=24, **case.data), verbose=False)
    return metrics


class Reduce(pl.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        number = torch.tensor(float(rank))
        self.seen = {
            "mean": float(strategy.reduce(number.clone())),
            "sum": float(strategy.reduce(number.clone(), reduce_op="sum")),
            "world": float(strategy.reduce(number.clone(), group=torch.distributed.group.WORLD, reduce_op="sum")),
            "text": strategy.reduce("as it was"),
            "all": [strategy.reduce_boolean_decision(vote) for vote in (True, False, rank == 1)],
            "any": [strategy.reduce_boolean_decision(vote, all=False) for vote in (True, False, rank == 1)],
            "sampler": strategy.distributed_sampler_kwargs,
            "counts": strategy.parameter_counts(),
            "broadcast": strategy.broadcast(rank, src=trainer.world_size - 1),
        }


def reductions(case: Case) -> dict[str, Any]:
    quiet()
    callback = Reduce()
    trainer_for(case, callback).fit(case.module(), datamodule=Data(length=8))
    return callback.seen


class Sampled(GPT):
    """Read through Lightning's own sampler; notes what it got."""

    def on_fit_start(self) -> None:
        self.read: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read += batch[2].tolist()
        return super().training_step(batch[:2], batch_idx)


def sampled(case: Case) -> list[int]:
    """The numbers of the samples that this rank read, of 30 samples in batches of 8."""
    quiet()
    inputs, targets = sequences(4 * ROWS).tensors
    data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
    module = Sampled()
    trainer_for(case).fit(module, DataLoader(data, batch_size=ROWS // 2, shuffle=True))
    return module.read


def worker_seeds(case: Case) -> list[float]:
    """The first random number of each of two workers, drawn here as a worker would."""
    quiet()
    pl.seed_everything(1, workers=True, verbose=False)
    try:
        trainer = trainer_for(case)
        trainer.fit(GPT(), DataLoader(sequences(ROWS), batch_size=4))
        seed = trainer.train_dataloader.worker_init_fn
        numbers = []
        for worker in range(2):
            torch.manual_seed(1000 + worker)  # as a DataLoader does: base seed plus worker
            seed(worker)
            numbers.append(float(torch.rand(())))
        return numbers
    finally:
        os.environ.pop("PL_SEED_WORKERS")


class Batches:
    """Batches that depend on the rank: on its number from batch ``after`` on, or in their size or dtype."""

    def __init__(self, wrong: list[int], after: int = 0, rows: int = 4) -> None:
        self.wrong, self.after, self.rows = wrong, after, rows

    def __iter__(self) -> Any:
        for number in range(self.after + 1):
            tokens = torch.arange(self.rows * 7).reshape(self.rows, 7) % VOCAB
            if torch.distributed.get_rank() in self.wrong and number == self.after:
                tokens[-1, -1] = (tokens[-1, -1] + 1) % VOCAB
            yield tokens[:, :-1], tokens[:, 1:]

    def __len__(self) -> int:
        return self.after + 1


def refused(case: Case, batches: Batches) -> str:
    """The error of a fit on these batches."""
    quiet()
    try:
        trainer_for(case).fit(case.module(), batches)
    except ConfigError as error:
        return str(error)
    return "accepted"


def guarded(tp: int, wrong_at: int, cp: int = 1, parts: bool = False) -> str:
    """The error of a guard that sees 202 batches of which rank 1 has another one at ``wrong_at``."""
    guard = BatchGuard(Mesh.build(ParallelDims(tp=tp, cp=cp, dp=2 // tp // cp), "cpu"), torch.device("cpu"))
    try:
        for number in range(202):
            batch = {"a": torch.arange(3), "b": [torch.tensor(number == wrong_at and torch.distributed.get_rank() == 1)]}
            guard.check(batch | ({"sequence_ids": torch.arange(3)} if parts else {}))
    except ConfigError as error:
        return str(error)
    return "accepted"


class OtherMetrics(GPT):
    def pipeline_loss(self, output: Tensor, microbatch: Any) -> Any:
        loss, _ = super().pipeline_loss(output, microbatch)
        return loss, {f"of step {self.global_step}": loss}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_step(batch)[0]
