"""One training or evaluation step over all ranks, from the batch of a dp replica to numbers that every rank agrees on.

The loss of a step is (sum of weighted losses over the global batch) / (sum of weights over the global batch); a weight is a number of
unmasked target tokens. The weights are added up over dp x cp before the first backward, so that each microbatch's backward starts from its
final share. Afterwards the shares of the loss and of the metrics are added up over the world (only one rank of each last stage's
tp group contributes), which is reduction over dp x cp and broadcast over pp in one collective.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.parallel.evaluation import EvaluationRunner
from lightning_3d.parallel.gradients import Gradients, hand_over
from lightning_3d.parallel.microbatch import check_equal
from lightning_3d.parallel.pipeline import StageWork, TrainingRunner
from lightning_3d.placement import SEQUENCE_IDS

Metrics = dict[str, Tensor]


@runtime_checkable
class StepWork(StageWork, Protocol):
    """What a step needs of a module besides its stages."""

    def shard_sequence(self, batch: Any) -> Any:
        """This rank's part of the batch's sequences, where cp > 1."""

    def join_sequence(self, output: Any) -> Any:
        """The inverse, of what ``pipeline_output`` gave; collective over cp."""

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        """The batch as at most ``count`` microbatches."""

    def loss_weight(self, microbatch: Any) -> Tensor | float:
        """What the microbatch's loss counts in the mean."""

    def pipeline_loss(self, output: Any, microbatch: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """On the last stage: the mean loss of the microbatch, and metrics to be averaged like it."""


class StepRunner:
    """Runs steps and reduces what they report.

    Args:
        count: number of microbatches of a training batch.
        last: pp coord of the last stage.
    """

    def __init__(self, work: StepWork, mesh: Mesh, device: torch.device, count: int, *, last: int) -> None:
        self._work, self._mesh, self._device, self.count, self._last = work, mesh, device, count, last
        self._is_last = mesh.coord.pp == last
        self._reports = self._is_last and mesh.coord.tp == 0
        self._names: dict[str, list[str]] = {}  # of the metrics, for training and evaluation: only the last stage knows them at first
        self._microbatches: list[Any] = []
        self._shares = torch.empty(0)
        self._results: dict[int, tuple[Tensor, Metrics]] = {}

    def train(self, batch: Any, runner: TrainingRunner, gradients: Gradients, reduce_now: Callable[[], bool]) -> tuple[Tensor, Metrics]:
        """Forward and backward of a batch: its loss (an autograd tensor that hands the gradients over) and its metrics."""
        self._microbatches = self._split(batch)
        check_equal(self._microbatches, self.count)
        weights = self._weights()
        total = self._total(weights)
        self._shares = weights / total.clamp(min=torch.finfo(torch.float64).tiny)
        fresh = gradients.run_apart(lambda: runner.run(self._microbatches, self._device))
        loss, metrics = self._reduce("train", self._shares, total)
        self._clear()
        return hand_over(loss, lambda scale: gradients.deliver(fresh, scale, reduce=reduce_now())), metrics

    def loss_of(self, number: int, output: Any) -> Float[Tensor, ""]:
        """The scaled loss of a microbatch on the last stage; called by the runner, once more when a schedule infers its shapes."""
        loss, metrics = self._loss_and_metrics(number, output)
        self._results[number] = (loss.detach(), metrics)
        return loss * self._shares[number].to(loss.dtype)

    def evaluate(self, batch: Any, runner: EvaluationRunner) -> tuple[Tensor, Metrics]:
        """Loss and metrics of a batch of any size, without gradients."""
        self._microbatches = self._split(batch)
        weights = self._weights()
        total = self._total(weights)

        def consume(number: int, output: Any) -> None:
            self._results[number] = self._loss_and_metrics(number, output)

        runner.run(self._microbatches, self._device, consume)
        result = self._reduce("evaluate", weights / total.clamp(min=torch.finfo(torch.float64).tiny), total)
        self._clear()
        return result

    def forward(self, batch: Any, runner: EvaluationRunner, output_of: Callable[[Any, Any], Any]) -> list[Any]:
        """What ``output_of(output, microbatch)`` makes of the last stage's outputs, by microbatch, on every rank of the pipeline.

        Shapes: what the module returns.
        Placement: the last stage, parts of the sequence -> all stages, whole sequences.
        Communication: what the module's ``join_sequence`` sends, cp; broadcast of the objects, pp, nbytes(outputs).
        Source: this project.
        """
        microbatches = self._split(batch)
        outputs: list[Any] = [None] * len(microbatches)

        def consume(number: int, output: Any) -> None:
            own = output_of(output, microbatches[number])
            outputs[number] = own if self._mesh.dims.cp == 1 else self._work.join_sequence(own)

        runner.run(microbatches, self._device, consume)
        if self._mesh.dims.pp > 1:
            source = dist.get_global_rank(self._mesh.pp_group, self._last)
            dist.broadcast_object_list(outputs, source, group=self._mesh.pp_group)
        return outputs

    def _split(self, batch: Any) -> list[Any]:
        if self._mesh.dims.cp > 1 and not (isinstance(batch, Mapping) and SEQUENCE_IDS in batch):
            batch = self._work.shard_sequence(batch)
        return self._work.split_batch(batch, self.count)

    def _clear(self) -> None:
        self._microbatches, self._results = [], {}

    def _loss_and_metrics(self, number: int, output: Any) -> tuple[Tensor, Metrics]:
        result = self._work.pipeline_loss(output, self._microbatches[number])
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _weights(self) -> Tensor:
        return torch.stack(
            [torch.as_tensor(self._work.loss_weight(m), dtype=torch.float64, device=self._device) for m in self._microbatches]
        )

    def _total(self, weights: Tensor) -> Tensor:
        """The weight of the global batch.

        Shapes: (microbatches,) -> ().
        Placement: each rank's sum -> replicated over dp x cp.
        Communication: all-reduce, dp x cp, 8 bytes a rank.
        Source: TorchTitan issue 1842 (a mean of ranks' means is wrong).
        """
        total = weights.sum()
        if self._mesh.dims.dp_cp > 1:
            dist.all_reduce(total, group=self._mesh.dp_cp_group)
        return total

    def _reduce(self, kind: str, shares: Tensor, total: Tensor) -> tuple[Tensor, Metrics]:
        """The numbers of the step, the same on every rank.

        Shapes: (1 + metrics,).
        Placement: last stages' shares -> replicated over the world.
        Communication: all-reduce, world, 8 bytes a number; the names once.
        Source: this project.
        """
        names = self._agree_on_names(kind)
        numbers = torch.zeros(1 + len(names), dtype=torch.float64, device=self._device)
        if self._reports:
            for number, (loss, metrics) in self._results.items():
                values = [loss, *(metrics[name] for name in names)]
                numbers += torch.stack([value.detach().to(torch.float64) for value in values]) * shares[number]
        if self._mesh.dims.world_size > 1:
            dist.all_reduce(numbers)
        # Not the default dtype alone: bf16-true sets it to bfloat16 inside steps, too coarse for a loss.
        dtype = torch.promote_types(torch.float32, torch.get_default_dtype())
        loss, *values = numbers.to(dtype).unbind()
        return loss, dict(zip(names, values, strict=True)) | {"weight": total}

    def _agree_on_names(self, kind: str) -> list[str]:
        """The names of the metrics, which only the last stage knows at first.

        Shapes: none.
        Placement: the last stage -> all stages.
        Communication: broadcast of the names, pp, once for training and once for evaluation.
        Source: this project.
        """
        mine = list(self._results[min(self._results)][1]) if self._is_last else []
        if kind not in self._names:
            box = [mine]
            if self._mesh.dims.pp > 1:
                dist.broadcast_object_list(box, dist.get_global_rank(self._mesh.pp_group, self._last), group=self._mesh.pp_group)
            self._names[kind] = box[0]
        if self._is_last and mine != self._names[kind]:
            raise ConfigError(f"pipeline_loss() returned metrics {mine}, but {self._names[kind]} before: return the same ones every time")
        return self._names[kind]
