"""Which part of which parameter lies on which rank: stages are built on the meta device and cut by the table that a run is cut by.

The stand-in for tensor parallelism cuts parameters and takes part in the forward as the real one does, but is one process: it notes
what would be sent, and makes tensors of the shapes that would come back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.parallel.blocks import named_blocks
from lightning_3d.parallel.context import Attend, ContextMethod, ContextParallel
from lightning_3d.parallel.plan import apply_plan
from lightning_3d.parallel.recompute import recompute_blocks
from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.placement import local_range
from lightning_3d.planning.setting import PlannedModule, Setting


@dataclass(frozen=True)
class Part:
    """One parameter of a stage, as one rank holds it.

    Args:
        name: global.
        unit: what FSDP gathers it with: a block, or "" for the rest of the stage.
        shape: whole.
        cut: shape after tp's cut.
        rows: of ``cut``'s first dim on this rank, after FSDP's cut.
        is_partial: whether its gradients are partial sums over tp.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    cut: tuple[int, ...]
    rows: int
    is_partial: bool

    @property
    def full_numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def cut_numel(self) -> int:
        """Elements of the part that tp leaves to this rank."""
        return prod(self.cut)

    @property
    def local_numel(self) -> int:
        """Elements on this rank."""
        return self.rows * prod(self.cut[1:])

    def padded_numel(self, shards: int) -> int:
        """Elements of a shard as FSDP stores it: the shards of a parameter are equally large."""
        return -(-self.cut[0] // shards) * prod(self.cut[1:])


Note = Callable[[str, str, int], None]  # called with the axis and the kind of a collective, and the bytes of its whole tensor


def _ignore(axis: str, kind: str, nbytes: int) -> None:
    """Note nothing."""


class StandIn(TensorParallel):
    """One rank of tp without the others."""

    def __init__(self, size: int, index: int, *, sequence_parallel: bool, on_cpu: bool, note: Note) -> None:
        self.size, self.index, self.sequence_parallel = size, index, sequence_parallel
        self._by_gather = on_cpu and size == 2  # as all_reduce_sum does
        self._note = note
        self.classes = {}

    @override
    def distribute(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        shape = list(parameter.shape)
        if dim is not None:
            start, end = local_range(shape[dim], self.size, self.index)
            shape[dim] = end - start
        part = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad)
        part.whole_shape = tuple(parameter.shape)  # type: ignore[attr-defined]
        return part

    @override
    def _sum(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        if self._by_gather:
            self._note("tp", "all-gather", 2 * x.nbytes)
            return torch.add(*x.new_empty((2, *x.shape)))
        self._note("tp", "all-reduce", x.nbytes)
        return x.contiguous().clone()

    @override
    def _gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        self._note("tp", "all-gather", self.size * x.nbytes)
        return x.new_empty((self.size, *x.shape)).movedim(0, 1).flatten(1, 2)

    @override
    def _scatter(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        self._note("tp", "reduce-scatter", x.nbytes)
        return torch.empty_like(x.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()[0])


class StandInContext(ContextParallel):
    """The first rank of cp without the others: attention to the tokens that it holds, which keeps what a ring's would."""

    def __init__(self, size: int, method: ContextMethod, note: Note) -> None:
        self.size, self.index, self.method, self._note = size, 0, method, note

    @override
    def attention(self, attend: Attend) -> Attend:
        return lambda q, k, v, documents=None: attend(_Noted.apply(q, *self._calls(q, k), self._note), k, v)

    def _calls(self, q: Shaped[Tensor, "..."], k: Shaped[Tensor, "..."]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Collectives of one attention's forward and backward."""
        both, wide = 2 * k.nbytes, 2 * k.numel() * max(4, k.element_size())
        if self.method == "allgather":
            return [("all-gather", both * self.size)], [("reduce-scatter", both * self.size)]
        if self.method == "ulysses":
            exchanges = [("all-to-all", q.nbytes + both), ("all-to-all", q.nbytes)]
            return exchanges, exchanges
        ring = [("send", both)] * (self.size - 1)
        return ring, ring + [("send", wide)] * self.size


class _Noted(torch.autograd.Function):
    """Passes a tensor on, and notes collectives as it does and as its gradient comes back."""

    @staticmethod
    def forward(
        ctx: Any, x: Shaped[Tensor, "..."], forward: list[tuple[str, int]], backward: list[tuple[str, int]], note: Note
    ) -> Shaped[Tensor, "..."]:
        for call in forward:
            note("cp", *call)
        ctx.calls, ctx.note = backward, note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        for call in ctx.calls:
            ctx.note("cp", *call)
        return grads[0], None, None, None


def cut_stage(module: PlannedModule, setting: Setting, index: int, *, tp: int = 0, note: Note = _ignore) -> tuple[nn.Module, set[str]]:
    """A stage on the meta device as the rank with coord ``tp`` would hold it before FSDP, and the names of partial gradients."""
    layout = setting.layout
    with torch.device("meta"):
        stage = module.build_stage(index, layout.num_stages)
    partial: set[str] = set()
    if layout.dims.tp > 1:
        stand_in = StandIn(layout.dims.tp, tp, sequence_parallel=layout.sequence_parallel, on_cpu=setting.on_cpu, note=note)
        partial = set(apply_plan(stage, module.tensor_parallel_plan, stand_in))
    if layout.dims.cp > 1:
        module.apply_context_parallel(stage, StandInContext(layout.dims.cp, layout.cp_method, note))
    recompute_blocks(stage, layout.recompute)
    return stage, partial


def parts(module: PlannedModule, setting: Setting, index: int, *, tp: int = 0, dp: int = 0) -> list[Part]:
    """The parameters of stage ``index`` as the rank with coords ``tp`` and ``dp`` holds them; coord 0 holds the largest part."""
    stage, partial = cut_stage(module, setting, index, tp=tp)
    units = [name for name, _ in named_blocks(stage)]
    shards, found = setting.shards, []
    for name, parameter in stage.named_parameters():
        cut = tuple(parameter.shape)
        start, end = local_range(cut[0], shards, dp % shards)
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        found.append(Part(name, unit, getattr(parameter, "whole_shape", cut), cut, end - start, name in partial))
    return found


def tied(stages: Sequence[Sequence[Part]], coords: Sequence[int]) -> dict[str, list[int]]:
    """Names that several ranks of the pipeline hold, with their pp coords; ``coords`` are those of the stages."""
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for part in stage:
            holders.setdefault(part.name, []).append(coords[index])
    return {name: coords for name, coords in holders.items() if len(set(coords)) > 1}


def full_numel(stages: Sequence[Sequence[Part]]) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum({part.name: part.full_numel for stage in stages for part in stage}.values())
