"""What a rank sends in a step: each collective, how often, how many bytes, and over which link.

Bytes are those of the whole tensor: what is added up, what is gathered, what is scattered. What a rank sends of it follows from the
collective and the number of ranks, by the rings that NCCL and gloo use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.data import buckets
from lightning_3d.planning.parameters import Part
from lightning_3d.planning.setting import Setting
from lightning_3d.planning.trace import Cost

Axis = Literal["tp", "cp", "pp", "dp", "dp_replicate", "world"]  # dp is dp x cp: both hold the same weights
Link = Literal["inside", "between"]


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of a rank in a step.

    Args:
        what: what is sent.
        axis: over which axis.
        kind: of collective.
        count: in a step.
        nbytes: of all their whole tensors together.
        ranks: of the group.
        link: inside a node, or between nodes.
    """

    what: str
    axis: Axis
    kind: str
    count: int
    nbytes: int
    ranks: int
    link: Link

    @property
    def sent_nbytes(self) -> int:
        """What a rank sends."""
        share = (self.ranks - 1) / self.ranks
        return int(self.nbytes * {"all-reduce": 2 * share, "send": 1.0}.get(self.kind, share))


def link(dims: ParallelDims, axis: Axis, gpus_per_node: int) -> Link:
    """Whether an axis stays inside a node for every rank; of replicate x shard, "dp" is the shards."""
    shards = dims.dp_cp // dims.replicate
    stride, size = {
        "tp": (1, dims.tp),
        "dp": (dims.tp, shards),
        "dp_replicate": (dims.tp * shards, dims.replicate),
        "cp": (dims.tp, dims.cp),
        "pp": (dims.tp * dims.dp_cp, dims.pp),
        "world": (1, dims.world_size),
    }[axis]
    return "inside" if gpus_per_node % (stride * size) == 0 else "between"


class Count:
    """Collects the traffic of one rank."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.found: list[Traffic] = []

    def add(self, what: str, axis: Axis, kind: str, ranks: int, nbytes: Sequence[int]) -> None:
        """Collectives of one kind, by the bytes of each; none where the axis has one rank."""
        if ranks > 1 and nbytes:
            where = link(self._setting.layout.dims, axis, self._setting.gpus_per_node)
            self.found.append(Traffic(what, axis, kind, len(nbytes), sum(nbytes), ranks, where))


def traffic(
    setting: Setting,
    coord: int,
    stages: Mapping[int, Sequence[Part]],
    costs: Mapping[int, Cost],
    coords: Sequence[int],
    tied: Mapping[str, Sequence[int]],
) -> list[Traffic]:
    """What the ranks at a pp coord send in a step.

    Args:
        setting: the run.
        coord: of the pipeline.
        stages: its parameters, by stage.
        costs: what a microbatch costs each stage of the pipeline.
        coords: of each stage.
        tied: coords of the holders of parameters that several of them share.
    """
    count = Count(setting)
    parts = [part for stage in stages.values() for part in stage]
    _layers(count, setting, stages, costs)
    _stages(count, setting, stages, costs, coords)
    _gradients(count, setting, parts)
    if setting.shards > 1:
        for stage in stages.values():
            _sharded(count, setting, stage)
    size = setting.dtype.itemsize
    shared = [size * part.local_numel for part in parts if coord in tied.get(part.name, ())]
    others = len(next(iter(tied.values()), ())) - 1
    count.add("tied gradients", "pp", "send", setting.layout.dims.pp, shared * max(others, 0))
    _numbers(count, setting)
    return count.found


def _layers(count: Count, setting: Setting, stages: Mapping[int, Sequence[Part]], costs: Mapping[int, Cost]) -> None:
    """tp: hidden states within layers, cp: keys and values, as traced; tp: two numbers a token of the loss."""
    tp, cp, microbatches = setting.layout.dims.tp, setting.layout.dims.cp, setting.microbatches
    calls = [(call, times) for index in stages for call, times in costs[index].calls.items()]
    for what, axis, ranks in (("hidden states", "tp", tp), ("keys and values", "cp", cp)):
        for kind in sorted({name for (over, name, _), _ in calls if over == axis}):
            nbytes = [size for (over, name, size), times in calls if (over, name) == (axis, kind) for _ in range(times)]
            count.add(what, axis, kind, ranks, nbytes * microbatches)  # type: ignore[arg-type]
    if setting.layout.num_stages - 1 in stages:
        tokens = setting.micro_batch_size * setting.held_tokens
        each = 2 * tp * tokens * max(4, setting.dtype.itemsize)
        count.add("losses", "tp", "all-gather", tp, [each] * setting.microbatches)


def _stages(count: Count, setting: Setting, stages: Mapping[int, Sequence[Part]], costs: Mapping[int, Cost], coords: Sequence[int]) -> None:
    """pp: hidden states to the next stage, their gradients to the one before."""
    pp, last, times = setting.layout.dims.pp, len(coords) - 1, setting.microbatches
    onward = [costs[index].output for index in stages if index < last and coords[index] != coords[index + 1]]
    back = [costs[index - 1].output for index in stages if index and coords[index] != coords[index - 1]]
    count.add("hidden states", "pp", "send", pp, onward * times)
    count.add("their gradients", "pp", "send", pp, back * times)


def _gradients(count: Count, setting: Setting, parts: Sequence[Part]) -> None:
    """Sums of gradients in buckets: over tp what each rank computed from its part of the sequence, over dp those of copies."""

    def sizes(some: Sequence[Part]) -> list[int]:
        local = {part.name: torch.empty(part.local_numel, dtype=setting.dtype, device="meta") for part in some}
        return [sum(local[name].nbytes for name in bucket) for bucket in buckets(local)]

    dims = setting.layout.dims
    count.add("gradients of norms", "tp", "all-reduce", dims.tp, sizes([part for part in parts if part.is_partial]))
    if setting.layout.data_parallel == "ddp":
        count.add("gradients", "dp", "all-reduce", dims.dp_cp, sizes(parts))


def _sharded(count: Count, setting: Setting, stage: Sequence[Part]) -> None:
    """FSDP: parameters are gathered once a step, blocks also before each backward where they were freed; gradients are scattered once."""
    layout, shards, size = setting.layout, setting.shards, setting.dtype.itemsize
    units: dict[str, int] = {}
    for part in stage:
        units[part.unit] = units.get(part.unit, 0) + size * shards * part.padded_numel(shards)
    frees = layout.data_parallel != "zero2" and layout.dims.pp == 1
    again = [nbytes for unit, nbytes in units.items() if unit and frees]
    count.add("parameters", "dp", "all-gather", shards, [*units.values()] + again * setting.microbatches)
    count.add("gradients", "dp", "reduce-scatter", shards, [*units.values()])
    count.add("gradients", "dp_replicate", "all-reduce", layout.dims.replicate, [nbytes // shards for nbytes in units.values()])


def _numbers(count: Count, setting: Setting) -> None:
    """Eight bytes each: token counts, losses and metrics, norms, whether to stop."""
    dims = setting.layout.dims
    count.add("token count", "dp", "all-reduce", dims.dp_cp, [8])
    count.add("loss, norms, stop", "world", "all-reduce", dims.world_size, [8 * (1 + setting.num_metrics)] + [8] * (setting.num_norms + 1))
