"""The schedules of a pipeline: which stage lies on which rank, what each rank computes in which order, and for which sizes that works.

    engine              stages on a rank   placement   backward   microbatches
    afab                1                  loop        B          any
    1f1b                1                  loop        B          at least pp
    interleaved_1f1b    2 or more          loop        B          a multiple of max(1, m // pp)
    looped_bfs          2 or more          loop        B          any
    zero_bubble         1 or more          loop        I, W       a multiple of max(1, m // pp)
    zbv                 2                  V           I, W       any
    dualpipe_v          2                  V           B, I, W    at least 2 pp
    FILE.csv            any                as it says  as it says as it says

Placement *loop*: stage i on rank i % pp. *V*: down the ranks and up again, so that the first and the last stage are on rank 0. Here,
and in the actions, a rank is a pp coord. ``actions`` gives the lists of any of them; ``timeline.simulate`` says when each action runs.

All that is private in torch.distributed.pipelining stays in this file: the lists come from torch's schedule classes, which need only
numbers of a stage to make them, and ``_PipelineScheduleRuntime`` runs them.

Source: afab: Huang et al. 2019 (GPipe); 1f1b, interleaved: Narayanan et al. 2021 (Megatron-LM); looped_bfs: Lamy-Poirier 2023
(Breadth-First Pipeline Parallelism); zero_bubble (ZB-H1 with one stage a rank), zbv: Qi et al. 2023 (Zero Bubble Pipeline
Parallelism); dualpipe_v: DeepSeek-AI 2024 (DualPipe), cut in half.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.timeline import Action, check_actions

Engine = Literal["afab", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipe_v"] | str  # or the path of a CSV file


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks of the layout."""

    torch_class: type
    placement: Literal["loop", "v"]
    virtual_stages: tuple[int, int | None]  # fewest, most
    splits_backward: bool = False
    needs: Literal["any", "pp", "2 pp", "rounds"] = "any"  # of the number of microbatches


ENGINES: dict[str, Schedule] = {
    "afab": Schedule(ScheduleGPipe, "loop", (1, 1)),
    "1f1b": Schedule(Schedule1F1B, "loop", (1, 1), needs="pp"),
    "interleaved_1f1b": Schedule(ScheduleInterleaved1F1B, "loop", (2, None), needs="rounds"),
    "looped_bfs": Schedule(ScheduleLoopedBFS, "loop", (2, None)),
    "zero_bubble": Schedule(ScheduleInterleavedZeroBubble, "loop", (1, None), splits_backward=True, needs="rounds"),
    "zbv": Schedule(ScheduleZBVZeroBubble, "v", (2, 2), splits_backward=True),
    "dualpipe_v": Schedule(ScheduleDualPipeV, "v", (2, 2), splits_backward=True, needs="2 pp"),
}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # as torch writes what dualpipe_v may run at once


def is_file(engine: Engine) -> bool:
    """Whether the schedule is read from a file."""
    return engine.endswith(".csv")


def check_engine(engine: Engine, *, pp: int, virtual_stages: int, microbatches: int | None) -> None:
    """Whether the schedule can run; with ``microbatches`` None as far as that can be told without their number.

    Raises:
        ConfigError: an unknown schedule, a number of stages or microbatches that it cannot run, a file that is no schedule.
    """
    if is_file(engine):
        _check_file(engine, pp, virtual_stages, microbatches)
        return
    if engine not in ENGINES:
        raise ConfigError(f"pp_engine={engine!r} is unknown: choose from {list(ENGINES)}, or name a .csv file")
    schedule = ENGINES[engine]
    if pp == 1 and virtual_stages != 1:
        raise ConfigError(f"virtual_stages={virtual_stages} with pp=1: there is no pipeline; leave it out, or set pp to 2 or more")
    if pp > 1 and not _fits(schedule, virtual_stages):
        fits = [name for name, other in ENGINES.items() if _fits(other, virtual_stages)]
        fewest, most = schedule.virtual_stages
        raise ConfigError(
            f"virtual_stages={virtual_stages} with pp_engine={engine} and pp={pp}: {engine} needs {fewest}"
            + ("" if most == fewest else " or more")
            + (f"; {virtual_stages} suits {', '.join(fits)}" if fits else "")
        )
    if microbatches is not None:
        _check_microbatches(engine, schedule.needs, pp, microbatches)


def _fits(schedule: Schedule, virtual_stages: int) -> bool:
    fewest, most = schedule.virtual_stages
    return fewest <= virtual_stages and (most is None or virtual_stages <= most)


def _check_microbatches(engine: str, needs: str, pp: int, microbatches: int) -> None:
    least = {"pp": pp, "2 pp": 2 * pp}.get(needs, 1) if pp > 1 else 1
    key = f"batch_accumulation_per_replica={microbatches}"
    if microbatches < least:
        raise ConfigError(
            f"{key} is too small for pp_engine={engine} with pp={pp}: set it to {least} or more" + (" or choose afab" if least > 1 else "")
        )
    if needs == "rounds" and pp > 1 and microbatches % max(1, microbatches // pp):
        raise ConfigError(f"{key} does not suit {engine} with pp={pp}: use a multiple of {pp}")


def check_halves(engine: Engine, pp: int, options: Mapping[str, Any]) -> None:
    """Whether backwards in two halves go with what else is done to the stages; ``options`` are those that they do not go with, if set.

    torch keeps the graph between the halves and runs the second one weight by weight: recomputation would compute a block again for each of
    them (selective fails), and what torch.compile makes has given its buffers away by then.

    Raises:
        ConfigError: they do not.
    """
    for key, value in options.items():
        if pp > 1 and value not in ("none", False) and splits_backward(engine):
            others = [name for name, schedule in ENGINES.items() if not schedule.splits_backward]
            raise ConfigError(
                f"{key}={value} with pp_engine={engine}, which runs backwards in two halves, does not work in torch: "
                f"leave {key} out, or choose pp_engine from {others}"
            )


def stage_coords(engine: Engine, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The pp coord of each stage."""
    stages = range(pp * virtual_stages)
    if pp > 1 and is_file(engine):
        homes = {action.stage: rank for rank, row in enumerate(_read(engine)) for action in row}
        return tuple(homes[stage] for stage in stages)
    if pp > 1 and ENGINES[engine].placement == "v":
        return tuple(min(stage, 2 * pp - 1 - stage) for stage in stages)
    return tuple(stage % pp for stage in stages)


def splits_backward(engine: Engine) -> bool:
    """Whether some backwards run in two halves, I and W."""
    if is_file(engine):
        return any(action.kind == "W" for row in _read(engine) for action in row)
    return ENGINES[engine].splits_backward


def actions(engine: Engine, pp: int, virtual_stages: int, microbatches: int) -> list[list[Action]]:
    """What each rank of the pipeline computes, in its order; a list for each pp coord.

    Raises:
        ConfigError: sizes that the schedule cannot run.
    """
    check_engine(engine, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    if is_file(engine):
        return [list(row) for row in _read(engine)]
    if pp == 1:
        return [[action for number in range(microbatches) for action in (Action(0, "F", number), Action(0, "B", number))]]
    if engine in ("afab", "1f1b"):
        return [_one_stage(rank, microbatches if engine == "afab" else pp - 1 - rank, microbatches) for rank in range(pp)]
    # Without processes: torch's classes look at these numbers only.
    stage = SimpleNamespace(num_stages=pp * virtual_stages, group_size=pp, group_rank=0, submod=None)
    schedule = ENGINES[engine].torch_class([stage] * virtual_stages, microbatches)
    return [[each for cell in schedule.pipeline_order[rank] if cell is not None for each in _flat(cell)] for rank in range(pp)]


def _one_stage(rank: int, ahead: int, microbatches: int) -> list[Action]:
    """Forwards run ``ahead`` of the backwards by so many microbatches."""
    forwards = [Action(rank, "F", number) for number in range(microbatches)]
    row = forwards[:ahead]
    for number in range(microbatches):
        row += [*forwards[ahead + number : ahead + number + 1], Action(rank, "B", number)]
    return row


def _flat(cell: Any) -> list[Action]:
    parts = [cell] if cell.sub_actions is None else cell.sub_actions
    return [Action(part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts]


# ---- files ---------------------------------------------------------------------------------------------------------------


def _check_file(path: str, pp: int, virtual_stages: int, microbatches: int | None) -> None:
    rows = _read(path)
    cells = [action for row in rows for action in row]
    found = max((action.microbatch for action in cells), default=-1) + 1
    homes = [sorted({action.stage for action in row}) for row in rows]
    if len(rows) != pp:
        raise ConfigError(f"pp_engine={path} has rows for {len(rows)} ranks, but pp={pp}: it needs one row a rank")
    if any(len(stages) != virtual_stages for stages in homes):
        raise ConfigError(
            f"pp_engine={path} has stages {homes} on its ranks, but virtual_stages={virtual_stages}: each rank needs that many"
        )
    if microbatches is not None and found != microbatches:
        raise ConfigError(
            f"pp_engine={path} is for {found} microbatches, but batch_accumulation_per_replica={microbatches}: set it to {found}"
        )
    try:
        check_actions(rows, pp * virtual_stages, found)
    except ConfigError as error:
        raise ConfigError(f"pp_engine={path} cannot run: {error}") from None


def _read(path: str) -> tuple[tuple[Action, ...], ...]:
    """The rows of a file as torch's ``_dump_csv(format="compute_only")`` writes it: one a rank, cells like 0F0, empty ones to wait."""
    if not Path(path).is_file():
        raise ConfigError(f"pp_engine={path}: there is no such file; name one, or choose from {list(ENGINES)}")
    with open(path, newline="") as file:
        table = list(csv.reader(file))
    rows = []
    for number, line in enumerate(table):
        row: list[Action] = []
        for cell in filter(None, map(str.strip, line)):
            overlapped = _OVERLAPPED.fullmatch(cell)
            parts = [_CELL.fullmatch(part.strip()) for part in (overlapped[1].split(";") if overlapped else [cell])]
            if None in parts:
                raise ConfigError(f"pp_engine={path} has {cell!r} in row {number}: a cell is stage, F, B, I or W, and microbatch, as 0F0")
            row += [Action(int(part[1]), part[2], int(part[3])) for part in parts if part is not None]  # type: ignore[arg-type]
        rows.append(tuple(row))
    return tuple(filter(None, rows))


# ---- running -------------------------------------------------------------------------------------------------------------


class Stage(PipelineStage):
    """A stage whose backward can run in halves, whatever its modules compute with.

    torch looks for the module's parameters in the autograd graph. Under tp there are plain leaves instead (tensor.py).
    """

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """The whole backward, or the half for the inputs or the weights."""
        if backward_type == "full" or isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        weights = iter([getattr(parameter, "local_leaf", parameter) for parameter in self.submod.parameters()])
        if backward_type == "weight":
            return stage_backward_weight(weights, bwd_kwargs["param_groups"]), None
        return stage_backward_input(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"], weights)


def build_schedule(engine: Engine, stages: Sequence[Stage], pp: int, microbatches: int, loss: Callable[..., Any]) -> Any:
    """A schedule of torch's over this rank's stages; its ``step`` runs it. Losses are added up, never scaled.

    Args:
        engine: name or file.
        stages: this rank's, in their order.
        pp: ranks of the pipeline.
        microbatches: in a batch.
        loss: of the last stage's output and the target.
    """
    if engine in ("afab", "1f1b"):
        return ENGINES[engine].torch_class(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    schedule = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    rows = actions(engine, pp, len(stages), microbatches)
    order: dict[int, list[Any]] = {
        rank: [_Action(a.stage, _ComputationType(a.kind), a.microbatch) for a in row] for rank, row in enumerate(rows)
    }
    schedule.pipeline_order = order
    schedule._prepare_schedule_with_comms(order)
    schedule.pipeline_order_with_comms[schedule.rank] = _whole_between(schedule.pipeline_order_with_comms[schedule.rank])
    return schedule


def _whole_between(order: list[_Action]) -> list[_Action]:
    """Gather FSDP's parameters before a stage's first action and free them after its last: torch keeps but three stages whole at a time."""
    gather, free = _ComputationType.UNSHARD, _ComputationType.RESHARD
    first = {action.stage_index: i for i, action in reversed(list(enumerate(order))) if action.computation_type == gather}
    last = {action.stage_index: i for i, action in enumerate(order) if action.computation_type == free}
    kept = {*first.values(), *last.values()}
    return [action for i, action in enumerate(order) if i in kept or action.computation_type not in (gather, free)]
