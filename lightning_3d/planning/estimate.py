"""A run before it starts: what each coord of the pipeline holds, sends and computes, and how long a step takes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from lightning_3d.parallel.schedules import actions
from lightning_3d.parallel.timeline import Timed, makespan
from lightning_3d.planning.communication import Traffic, traffic
from lightning_3d.planning.gpus import Gpu
from lightning_3d.planning.memory import Memory, Moment, moments, peak
from lightning_3d.planning.parameters import Part, full_numel, parts, tied
from lightning_3d.planning.setting import Setting
from lightning_3d.planning.time import (
    after_schedule_s,
    bubble,
    even_timeline,
    flops_per_token,
    microbatch_s,
    timeline,
    work_factor,
)
from lightning_3d.planning.trace import Cost, trace

Costs = dict[Any, Cost]


@dataclass(frozen=True)
class Stage:
    """What the ranks at one coord of the pipeline have to do: one stage, or several virtual ones."""

    coord: int
    parts: Mapping[int, Sequence[Part]]
    moments: Sequence[Moment]
    traffic: Sequence[Traffic]
    flops_per_token: int

    @property
    def full_numel(self) -> int:
        """Parameters, over all the ranks that share them."""
        return sum(part.full_numel for stage in self.parts.values() for part in stage)

    @property
    def local_numel(self) -> int:
        """Parameters on the rank that holds most."""
        return sum(part.local_numel for stage in self.parts.values() for part in stage)

    @cached_property
    def peak(self) -> Memory:
        """The memory at the worst moment."""
        return peak(self.moments)

    @property
    def contents(self) -> str:
        """Its blocks by number, and what else it has."""
        return " + ".join(_contents(stage) for stage in self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """A run before it starts."""

    setting: Setting
    gpu: Gpu
    numel: int
    stages: Sequence[Stage]
    timeline: Sequence[Timed]
    bubble: float
    after_schedule_s: float

    @property
    def schedule_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return makespan(self.timeline)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.schedule_s + self.after_schedule_s

    @property
    def idle(self) -> float:
        """The share of the schedule's time in which ranks wait, with the stages as they are."""
        return bubble(self.timeline, self.setting.layout.dims)

    @property
    def flops_per_token(self) -> int:
        """Operations of the model, forward and backward, a token."""
        return sum(stage.flops_per_token for stage in self.stages)

    @property
    def mfu(self) -> float:
        """The share of the GPUs' peak that the model's operations are."""
        done = self.flops_per_token * self.setting.global_batch_tokens
        return done / (self.step_s * self.setting.layout.dims.world_size * self.gpu.peak_flops_per_s)

    @property
    def worst(self) -> Stage:
        """The coord of the pipeline with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak.total)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak fits the GPU."""
        return self.worst.peak.total <= self.gpu.usable_nbytes


def estimate(module: Any, setting: Setting, gpu: Gpu, known: Costs | None = None) -> Estimate:
    """Plan a run.

    Args:
        module: builds the stages; none of its weights exist.
        setting: the run.
        gpu: what each rank has.
        known: costs of stages that were traced before, to be used again and added to.

    Raises:
        ConfigError: the layout is not possible, or the module cannot be planned.
    """
    layout, known = setting.layout, {} if known is None else known
    everything = [parts(module, setting, index) for index in range(layout.num_stages)]
    costs = {index: _cost(module, setting, index, stage, known) for index, stage in enumerate(everything)}
    coords = layout.stage_coords
    rows = actions(setting.engine, layout.dims.pp, setting.virtual_stages, setting.microbatches)
    holders = tied(everything, coords)
    stages = []
    for coord in range(layout.dims.pp):
        mine = {index: stage for index, stage in enumerate(everything) if coords[index] == coord}
        sent = traffic(setting, coord, mine, costs, coords, holders)
        flops = sum(flops_per_token(module, setting, stage) for stage in mine.values())
        stages.append(Stage(coord, mine, moments(setting, rows[coord], mine, costs), sent, flops))
    stage_s = [_stage_s(module, setting, gpu, stages[coords[index]], everything[index]) for index in range(layout.num_stages)]
    where = next((sent.link for stage in stages for sent in stage.traffic if sent.axis == "pp"), "inside")
    transfer_s = max((cost.output for cost in costs.values()), default=0) / gpu.link_nbytes_per_s(where) if layout.dims.pp > 1 else 0.0
    return Estimate(
        setting,
        gpu,
        full_numel(everything),
        stages,
        timeline(rows, stage_s, transfer_s),
        bubble(even_timeline(rows), layout.dims),
        max(after_schedule_s(gpu, stage.traffic) for stage in stages),
    )


def _cost(module: Any, setting: Setting, index: int, stage: Sequence[Part], known: Costs) -> Cost:
    """Of stages that are alike one is traced."""
    shapes: dict[str, list[Any]] = {}
    for part in stage:
        shapes.setdefault(part.unit, []).append((part.name.removeprefix(part.unit), part.cut))
    units = Counter((bool(unit), tuple(content)) for unit, content in shapes.items())
    layout = setting.layout
    run = (
        layout.dims.tp,
        layout.dims.cp,
        layout.cp_method,
        layout.sequence_parallel,
        layout.recompute,
        setting.micro_batch_size,
        setting.sequence_length,
    )
    place = (index == 0, index == layout.num_stages - 1, setting.precision, setting.mask_documents, setting.on_cpu)
    key = (frozenset(units.items()), run, place)
    if key not in known:
        known[key] = trace(module, setting, index)
    return known[key]


def _stage_s(module: Any, setting: Setting, gpu: Gpu, holder: Stage, stage: Sequence[Part]) -> float:
    """Seconds of a microbatch, forward and backward; collectives within layers by the stage's share of its rank's."""
    flops = flops_per_token(module, setting, stage) * work_factor(setting, stage)
    share = len(stage) / max(1, sum(len(other) for other in holder.parts.values()))
    alone = microbatch_s(setting, gpu, 0.0, holder.traffic)
    return microbatch_s(setting, gpu, flops, ()) + share * alone


def _contents(stage: Sequence[Part]) -> str:
    numbers = [int(unit.rsplit(".", 1)[1]) for unit in dict.fromkeys(part.unit for part in stage if part.unit)]
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    layers = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    rest = list(dict.fromkeys(part.name.rsplit(".", 1)[0] for part in stage if not part.unit))
    before, after = [name for name in rest if "embed" in name and stage[0].name.startswith(name)], rest
    return " ".join([*before, layers, *(name for name in after if name not in before)])
