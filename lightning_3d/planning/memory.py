"""Bytes of a rank, by kind, at the moment when they are most.

Three moments may be the worst: within the schedule, when most microbatches are in flight; at the end of a backward, when FSDP has gathered
every block and holds every gradient whole; and when gradients are added up over dp, which takes a copy of them.

With more than one microbatch, or a pipeline, FSDP keeps gradients whole until the last one: sharding them pays only where one microbatch
is the whole batch. Weights that autocast has converted stay until the step ends, also of blocks that FSDP has freed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from lightning_3d.parallel.timeline import Action
from lightning_3d.planning.parameters import Part
from lightning_3d.planning.setting import Setting
from lightning_3d.planning.trace import Cost, Phase

# Blocks that FSDP holds at once: the one at work, if any, and the next; in the forward also what the one at work was gathered into.
LOOKAHEAD: dict[Phase, int] = {"forward": 3, "loss": 1, "backward": 2, "end": 2, "after": 0}


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
    kept = sum(_sharded_nbytes(setting, stage) for stage in stages.values())
    copies = kept if setting.layout.data_parallel == "ddp" and setting.layout.dims.dp_cp > 1 else 0
    return [Moment(None, rest), *found, Moment(None, replace(rest, gradients=kept, reduction=copies))]


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

    def memory(phase: Phase, at_work: int, extra: int = 0) -> Memory:
        gradients = sum(_whole_nbytes(setting, stages[index]) for index in has_gradients)
        reduction = 0
        if setting.scatters_at_once:
            gradients, reduction = _scattered_nbytes(setting, stages[at_work], phase)
        logits = in_flight.get(last_stage, 0) * costs[last_stage].logits if last_stage in stages else 0
        activations = sum(count * costs[index].kept for index, count in in_flight.items()) - logits
        if at_work == last_stage and phase in ("forward", "loss"):
            logits += extra
        else:
            activations += extra
        gathered = sum(_gathered_nbytes(setting, stage, phase) for stage in stages.values())
        return replace(rest, gradients=gradients, reduction=reduction, activations=activations, logits=logits, gathered=gathered)

    for action in row:
        index, kind, _ = action
        if kind == "F":
            in_flight[index] += 1
        for phase, extra in costs[index].extra.items():
            if (phase == "forward") == (kind == "F"):
                yield Moment(action, memory(phase, index, extra))
        if kind not in "FI":
            in_flight[index] -= 1
            has_gradients.add(index)
            yield Moment(action, memory("after", index))


def _whole_nbytes(setting: Setting, parts: Sequence[Part]) -> int:
    """Of gradients or parameters that FSDP has not cut."""
    return setting.dtype.itemsize * sum(part.cut_numel for part in parts)


def _sharded_nbytes(setting: Setting, parts: Sequence[Part]) -> int:
    """Of gradients as a rank keeps them in the end; with the weights, where those are offloaded."""
    return 0 if setting.layout.cpu_offload else setting.dtype.itemsize * sum(part.padded_numel(setting.shards) for part in parts)


def _scattered_nbytes(setting: Setting, stage: Sequence[Part], phase: Phase) -> tuple[int, int]:
    """Of gradients that FSDP scatters block by block, and of what it scatters just now.

    Those of what is in no block wait for the end: until then there are those of what comes after the blocks, the head's.
    """
    root, *blocks = _units(stage)
    end_of_blocks = max((place for place, part in enumerate(stage, 1) if part.unit), default=0)
    after_blocks = _whole_nbytes(setting, stage[end_of_blocks:])
    if phase == "backward":
        return after_blocks, 0
    if phase == "end":
        done = sum(_sharded_nbytes(setting, block) for block in blocks[2:])
        return after_blocks + done, max((_whole_nbytes(setting, block) for block in blocks[2:]), default=0)
    if phase == "after":
        return _whole_nbytes(setting, root) + sum(_sharded_nbytes(setting, block) for block in blocks), _whole_nbytes(setting, root)
    return 0, 0


def _gathered_nbytes(setting: Setting, stage: Sequence[Part], phase: Phase) -> int:
    """Of what FSDP holds whole: all of it, or but the blocks at work."""
    if setting.shards == 1:
        return 0
    layout = setting.layout
    if layout.data_parallel == "zero2" or layout.dims.pp > 1 or (phase in ("end", "after") and setting.microbatches > 1):
        return _whole_nbytes(setting, stage)
    root, *blocks = _units(stage)
    return _whole_nbytes(setting, root) + sum(sorted((_whole_nbytes(setting, block) for block in blocks), reverse=True)[: LOOKAHEAD[phase]])


def _units(stage: Sequence[Part]) -> list[list[Part]]:
    """What FSDP gathers at a time: the stage without its blocks, and each of them."""
    units: dict[str, list[Part]] = {"": []}
    for part in stage:
        units.setdefault(part.unit, []).append(part)
    return [*units.values()]
