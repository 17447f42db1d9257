"""Bytes of a rank, by kind, at the moment when they are most.

Three moments may be the worst: within the schedule, when most microbatches are in flight; at its end, when FSDP has gathered every block
and holds every gradient whole; and when gradients are added up over dp, which takes a copy of them.

With more than one microbatch, or a pipeline, FSDP keeps gradients whole until the last one: sharding them pays only where one microbatch
is the whole batch. Weights that autocast has converted stay until the step ends, also of blocks that FSDP has freed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from lightning_3d.parallel.timeline import Action
from lightning_3d.planning.parameters import Part
from lightning_3d.planning.setting import Setting
from lightning_3d.planning.trace import Cost

During = Literal["forward", "backward", "between"]  # microbatches
# Blocks that FSDP holds at once: the one at work and the next; in the forward also what the one at work was gathered into.
LOOKAHEAD = {"forward": 3, "backward": 2, "between": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes by kind.

    Args:
        weights: parameters at rest.
        gathered: parameters that FSDP has put together.
        casts: weights in the autocast's dtype.
        gradients: of the parameters.
        reduction: copies of gradients on their way to other ranks.
        optimizer: AdamW's two moments.
        activations: what microbatches in flight keep, and what is needed for moments besides.
        logits: of the microbatches in flight on the last stage, and what the loss makes of them.
        receive: buffers for what comes from the stages before and after.
    """

    weights: int = 0
    gathered: int = 0
    casts: int = 0
    gradients: int = 0
    reduction: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    receive: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(asdict(self).values())

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind that there is any of."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}


@dataclass(frozen=True)
class Moment:
    """The memory of a rank before, in or after one of its actions."""

    action: Action | None
    memory: Memory


def moments(setting: Setting, row: Sequence[Action], stages: Mapping[int, Sequence[Part]], costs: Mapping[int, Cost]) -> list[Moment]:
    """The memory of a rank through a step, the second or a later one.

    Args:
        setting: the run.
        row: what the rank computes, in order.
        stages: its parameters, by stage.
        costs: what a microbatch costs each of its stages, and the stages before them.
    """
    rest = _at_rest(setting, stages, costs)
    found = [*_in_schedule(setting, row, stages, costs, rest)]
    whole = sum(_gradient_nbytes(setting, stage, whole=False) for stage in stages.values())
    copies = whole if setting.layout.data_parallel == "ddp" and setting.layout.dims.dp_cp > 1 else 0
    return [Moment(None, rest), *found, Moment(None, replace(rest, gradients=whole, reduction=copies))]


def peak(found: Sequence[Moment]) -> Memory:
    """The memory at the worst moment."""
    return max((moment.memory for moment in found), key=lambda memory: memory.total)


def _at_rest(setting: Setting, stages: Mapping[int, Sequence[Part]], costs: Mapping[int, Cost]) -> Memory:
    size, last = setting.dtype.itemsize, setting.layout.num_stages - 1
    here = not setting.layout.cpu_offload  # else in the CPU's memory
    all_parts = [part for stage in stages.values() for part in stage]
    receive = sum((costs[index - 1].output if index else 0) + (costs[index].output if index < last else 0) for index in stages)
    return Memory(
        weights=here * size * sum(part.padded_numel(setting.shards) for part in all_parts),
        optimizer=here * 2 * size * sum(part.local_numel for part in all_parts),
        receive=setting.microbatches * receive,
    )


def _in_schedule(
    setting: Setting, row: Sequence[Action], stages: Mapping[int, Sequence[Part]], costs: Mapping[int, Cost], rest: Memory
) -> Iterator[Moment]:
    last_stage = setting.layout.num_stages - 1
    rest = replace(rest, casts=sum(costs[index].shared for index in stages))
    in_flight = dict.fromkeys(stages, 0)
    has_gradients: set[int] = set()

    def memory(extra: int, extra_on: int, during: During) -> Memory:
        gradients = sum(_gradient_nbytes(setting, stages[index], whole=True) for index in has_gradients)
        logits = in_flight.get(last_stage, 0) * costs[last_stage].logits if last_stage in stages else 0
        activations = sum(count * costs[index].kept for index, count in in_flight.items()) - logits
        extras = {"logits": logits + extra} if extra_on == last_stage else {"logits": logits}
        activations += extra if extra_on != last_stage else 0
        gathered = sum(_gathered_nbytes(setting, stage, during) for stage in stages.values())
        return replace(rest, gradients=gradients, activations=activations, gathered=gathered, **extras)

    for action in row:
        index, kind, _ = action
        if kind == "F":
            in_flight[index] += 1
            yield Moment(action, memory(costs[index].forward_extra, index, "forward"))
            continue
        yield Moment(action, memory(costs[index].backward_extra, index, "backward"))
        if kind != "I":
            in_flight[index] -= 1
            has_gradients.add(index)
            yield Moment(action, memory(0, index, "between"))


def _gradient_nbytes(setting: Setting, stage: Sequence[Part], *, whole: bool) -> int:
    """Of a stage's gradients: as a rank keeps them in the end, with the weights where those are offloaded, or while microbatches come."""
    keeps_whole = whole and (setting.microbatches > 1 or setting.layout.dims.pp > 1)
    if setting.layout.cpu_offload and not keeps_whole:
        return 0
    size, shards = setting.dtype.itemsize, setting.shards
    return size * sum(part.cut_numel if keeps_whole else part.padded_numel(shards) for part in stage)


def _gathered_nbytes(setting: Setting, stage: Sequence[Part], during: During) -> int:
    """Of what FSDP holds whole: all of it, or but the blocks at work."""
    if setting.shards == 1:
        return 0
    size, layout = setting.dtype.itemsize, setting.layout
    units: dict[str, int] = {}
    for part in stage:
        units[part.unit] = units.get(part.unit, 0) + size * part.cut_numel
    if layout.data_parallel == "zero2" or layout.dims.pp > 1 or (during == "between" and setting.microbatches > 1):
        return sum(units.values())
    at_work = sorted((nbytes for unit, nbytes in units.items() if unit), reverse=True)[: LOOKAHEAD[during]]
    return units.get("", 0) + sum(at_work)
