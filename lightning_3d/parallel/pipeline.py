"""Pipeline parallelism: the split into stages, and torch's schedules driven by microbatch number.

Which stage lies where, and what runs when, is schedules.py's. torch's schedules split tensors themselves, on dim 0; so they get the
*number* of each microbatch as their only input, and a hook on the stage looks the microbatch up. Any pytree works then, and every stage
may use the batch.

The loss is scaled before its backward (``scale_grads=False``): one place owns the scale.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.parallel.data import set_last_microbatch
from lightning_3d.parallel.microbatch import signature, tensor_leaves
from lightning_3d.parallel.schedules import Engine, Stage, build_schedule

MAX_SCHEDULES = 8  # a schedule holds its receive buffers: keep a few shapes (lengths change by data stage), not all of them


@runtime_checkable  # tests check types while they run
class StageWork(Protocol):
    """What the runners need of a module: its stages' inputs and its loss."""

    def stage_inputs(self, microbatch: Any) -> tuple[Any, ...]:
        """Positional inputs of the first stage."""

    def stage_kwargs(self, microbatch: Any) -> dict[str, Any]:
        """Keyword inputs of every stage."""


def split_layers(num_layers: int, num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0) -> list[range]:
    """Contiguous layers for each stage, such that the dearest stage is as cheap as can be; every stage has at least one layer.

    Args:
        num_layers: layers of the model.
        num_stages: stages of the pipeline.
        first_cost: what the first stage does besides its layers (embedding), in layers.
        last_cost: what the last stage does besides its layers (norm and head), in layers.

    Raises:
        ConfigError: more stages than layers.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"pp x virtual_stages = {num_stages} stages, but num_hidden_layers={num_layers}: each stage needs at least one layer"
        )
    extra = [0.0] * num_stages
    extra[0] += first_cost
    extra[-1] += last_cost
    # best[s][n]: cost of the dearest of the first s stages when they hold n layers, and how many the last of them holds.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, int]] = {}
        for layers in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            choices = [(max(cost, layers - n + extra[stage]), layers - n) for n, (cost, _) in best[-1].items() if n < layers]
            row[layers] = min(choices)
        best.append(row)
    ends = [num_layers]
    for row in reversed(best[1:]):
        ends.append(ends[-1] - row[ends[-1]][1])
    ends.reverse()
    return [range(start, end) for start, end in pairwise(ends)]


def _require_grad(stage: nn.Module, args: Any, output: Any) -> Any:
    """The output of a stage that is all frozen requires grad like any other's: schedules settle once what is sent back, and it may thaw."""
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensor_leaves(output)):
        return None
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), output)


class TrainingRunner:
    """Forward and backward of all microbatches through this rank's stages.

    Args:
        stages: this rank's stages by their number in the pipeline.
        loss: called on the last stage with (number of the microbatch, output); returns the scaled loss to differentiate.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        mesh: Mesh,
        engine: Engine,
        work: StageWork,
        loss: Callable[[int, Any], Tensor],
    ) -> None:
        self._stages, self._num_stages, self._mesh, self._engine = stages, num_stages, mesh, engine
        self._work, self._loss = work, loss
        self._microbatches: list[Any] = []
        self._schedules: dict[Any, Any] = {}
        for index, stage in stages.items():
            stage.register_forward_pre_hook(self._look_up(first=index == 0), with_kwargs=True)
            stage.register_forward_hook(_require_grad)

    def run(self, microbatches: list[Any], device: torch.device) -> None:
        """Run them; gradients are in ``.grad`` afterwards, FSDP's already added up over dp."""
        if self._num_stages == 1:
            self._accumulate(microbatches)
            return
        key = (len(microbatches), signature(microbatches[0]))
        schedule = self._schedules.pop(key, None) or self._build(len(microbatches), device)
        self._schedules[key] = schedule  # the most recently used is last
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        self._microbatches = microbatches
        numbers = torch.arange(len(microbatches))
        schedule.step(*((numbers,) if 0 in self._stages else ()), target=numbers, microbatch=numbers, return_outputs=False)
        self._microbatches = []

    def _accumulate(self, microbatches: list[Any]) -> None:
        """One stage: the same microbatches as gradient accumulation."""
        (stage,) = self._stages.values()
        for number, microbatch in enumerate(microbatches):
            set_last_microbatch(stage, number == len(microbatches) - 1)
            output = stage(*self._work.stage_inputs(microbatch), **self._work.stage_kwargs(microbatch))
            self._loss(number, output).backward()

    def _build(self, count: int, device: torch.device) -> Any:
        stages = [Stage(s, i, self._num_stages, device, group=self._mesh.pp_group) for i, s in sorted(self._stages.items())]

        def loss(output: Any, number: Int[Tensor, "1"]) -> Float[Tensor, ""]:
            return self._loss(int(number), output)

        return build_schedule(self._engine, stages, self._mesh.dims.pp, count, loss)

    def _look_up(self, *, first: bool) -> Callable[..., Any]:
        def hook(stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._microbatches or "microbatch" not in kwargs:
                return None
            microbatch = self._microbatches[int(kwargs["microbatch"])]
            return (self._work.stage_inputs(microbatch) if first else args), self._work.stage_kwargs(microbatch)

        return hook
