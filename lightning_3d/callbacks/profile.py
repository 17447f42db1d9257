"""Where the time of a step goes, by kind of work: what ``python -m lightning_3d profile`` shows.

Of each moment of a rank one kind is true: what is computed (attention, matrix products, other), else communication that nothing hides,
else whatever else Python does (other), else idle. On CPUs that is the main thread, on CUDA the device's streams (not measured on a GPU).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_3d.callbacks.ranks import gather

KINDS = ("attention", "matmul", "communication", "other", "idle")
WARMUP_STEPS = 1

_ATTENTION = ("scaled_dot_product", "attention", "flash", "fmha")
_MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "gemm", "cutlass", "cublas", "nvjet")
_COMMUNICATION = ("nccl", "gloo:")

Span = tuple[float, float]  # begin and end, microseconds


class Profile(Callback):
    """Writes ``rank-000.json``, a Chrome trace (chrome://tracing, ui.perfetto.dev), of each rank, prints a table, and writes it as JSON.

    The table has, for the ranks that hold the same stages, mean milliseconds a step. The profiler itself makes small operations slower.

    Args:
        steps: training batches to look at, after the first.
        out: folder to write to.
    """

    def __init__(self, steps: int = 3, out: str = "profile") -> None:
        self.steps, self.out = steps, Path(out)
        self._profile: Any = None
        self._start_s = 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS:
            on_cuda = trainer.strategy.root_device.type == "cuda"
            self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])])
            self._profile.start()
            self._start_s = perf_counter()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if batch_idx != WARMUP_STEPS + self.steps - 1:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        wall_us = 1e6 * (perf_counter() - self._start_s)
        self._profile.stop()
        self.out.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.out / f"rank-{trainer.global_rank:03}.json"))
        times = shares(self._profile.events(), wall_us)
        table = by_stages(trainer, gather(trainer, [times[kind] / 1e3 / self.steps for kind in KINDS]))
        if trainer.is_global_zero:
            (self.out / "profile.json").write_text(json.dumps(table, indent=1))
            print(f"{as_text(table)}\n\n  traces  {self.out}", flush=True)


def shares(events: Iterable[Any], wall_us: float) -> dict[str, float]:
    """Microseconds of each kind, which add up to ``wall_us``; from the events of torch's profiler."""
    events = list(events)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    communication = [span(event) for event in kernels or events if any(word in event.name for word in _COMMUNICATION)]
    if kernels:
        work = [event for event in kernels if not any(word in event.name for word in _COMMUNICATION)]
        python: list[Span] = []
    else:
        operators = [event for event in events if is_outermost(event)]
        threads = {event.thread: 0.0 for event in operators}
        for event in operators:
            threads[event.thread] += length([span(event)])
        main = max(threads, key=threads.__getitem__, default=0)
        work = [event for event in operators if event.thread == main]
        python = [span(event) for event in events if event.thread == main and not event.is_async]
    times = dict.fromkeys(KINDS, 0.0)
    covered: list[Span] = []
    for kind in ("attention", "matmul", "other"):  # kernels in two streams at once count once
        spans = [*covered, *(span(event) for event in work if kind_of(event.name) == kind)]
        times[kind], covered = length(spans) - length(covered), spans
    for kind, more in (("communication", communication), ("other", python)):
        spans = [*covered, *more]
        times[kind], covered = times[kind] + length(spans) - length(covered), spans
    times["idle"] = max(0.0, wall_us - sum(times.values()))
    return times


def kind_of(name: str) -> str:
    """attention, matmul or other, by the name of an operator or a kernel."""
    name = name.lower()
    return next((kind for kind, words in (("attention", _ATTENTION), ("matmul", _MATMUL)) if any(word in name for word in words)), "other")


def is_outermost(event: Any) -> bool:
    """Whether it is an operator of torch that no other operator called."""
    if not event.name.startswith("aten::"):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return False
        parent = parent.cpu_parent
    return True


def span(event: Any) -> Span:
    """When it began and ended."""
    return event.time_range.start, event.time_range.end


def length(spans: Iterable[Span]) -> float:
    """How much time spans cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def by_stages(trainer: Trainer, times_ms: Float[Tensor, "ranks kinds"]) -> dict[str, dict[str, float]]:
    """The mean over the ranks with the same stages; their stages -> kind -> milliseconds a step."""
    layout = getattr(trainer.strategy, "layout", None)
    stages = layout.stage_coords if layout is not None else (0,)
    coords = torch.tensor([layout.dims.coord(rank).pp if layout is not None else 0 for rank in range(trainer.world_size)])
    table = {}
    for coord in sorted(set(stages)):
        held = ", ".join(str(stage) for stage, at in enumerate(stages) if at == coord)
        mean = times_ms[coords == coord].mean(dim=0).tolist()
        table[f"stage {held}"] = dict(zip(KINDS, mean, strict=True))
    return table


def as_text(table: dict[str, dict[str, float]]) -> str:
    """A row for each stage."""
    lines = [f"\n  {'ms a step':14}" + "".join(f"{kind:>16}" for kind in (*KINDS, "total"))]
    for stage, times in table.items():
        total = sum(times.values())
        cells = [f"{times[kind]:9.1f} ({times[kind] / total:4.0%})" for kind in KINDS]
        lines.append(f"  {stage:14}" + "".join(f"{cell:>16}" for cell in cells) + f"{total:16.1f}")
    return "\n".join(lines)
