"""The time of a step under each schedule of the pipeline, against the ideal of its own stage times, and its bubble.

    OMP_NUM_THREADS=1 python benchmarks/schedules.py [--engines 1f1b zbv] [--accumulation 16 --steps 20 --hidden 512 ...]

Prints tables and writes benchmarks/results/schedules.json. On two ranks every action (forward, backward, halves of a backward) is timed
where it computes. The *ideal* is the simulation of the schedule's list of actions with these times and messages that take none, so it has
the schedule's own bubble: what a step takes beyond it is waiting for messages, bookkeeping and noise. The *bubble* is the share of the
ranks' time in which they do not compute, and the formula is (p - 1) / (m v + p - 1), for schedules that do not split the backward.

The second table simulates more ranks, with the work of a rank as measured on two, and 4 microbatches a rank.
"""

import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from figures import shown, spread, write
from layouts import HOUR_S
from measure import Replica, Setting, bare_trainer, options, quiet
from rich.console import Console
from rich.table import Table

from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.pipeline import TrainingRunner
from lightning_3d.parallel.schedules import ENGINES, Stage, actions
from lightning_3d.parallel.timeline import Action, makespan, simulate
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.testing import RankPool

RANKS = 2
TARGET = 1.05
SIZES = {"hidden": 384, "layers": 8, "ffn": 1024, "vocabulary": 512, "micro_batch": 1, "accumulation": 8, "warmup": 2, "steps": 10}
SIMULATED = (2, 4, 8, 16, 32, 64)


@dataclass
class Times:
    """Seconds of one rank: of each action by stage and kind, and of the steps."""

    actions: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE", help="of %(choices)s")
    parser.add_argument("--ranks", nargs="+", type=int, default=SIMULATED, help="to simulate")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/schedules.json")
    parsed, setting = options(parser, argv, SIZES)
    results: dict[str, Any] = {"measured": {}, "simulated": {}}
    with RankPool() as pool:
        for engine in parsed.engines:
            virtual = ENGINES[engine].virtual_stages[0]
            ranks = pool.run(fit, RANKS, (setting, engine, virtual), timeout_s=HOUR_S)
            results["measured"][engine] = row = summary(ranks, engine, virtual, setting.accumulation)
            results["simulated"][engine] = {ranks: bubble_of(engine, virtual, ranks, 4 * ranks, row["work_s"]) for ranks in parsed.ranks}
    show(results, setting.accumulation)
    write(parsed.output, results, asdict(setting))


def fit(setting: Setting, engine: str, virtual: int) -> Times:
    """Train with clocks around what computes; on every rank."""
    quiet()
    strategy = ThreeDStrategy(pp=RANKS, pp_engine=engine, virtual_stages=virtual, batch_accumulation_per_replica=setting.accumulation)
    times = Times()
    trainer = bare_trainer(strategy, max_steps=setting.warmup + setting.steps, callbacks=[Clocks(times, setting.warmup)])
    trainer.fit(LlamaModule(setting.llama, AdamW(lr_decay_style="constant")), Replica(setting, strategy))
    return times


class Clocks(pl.Callback):
    """Puts clocks around the schedule, and around forward, loss and backward of a stage, from the end of the warm-up until the end."""

    def __init__(self, times: Times, warmup: int) -> None:
        self.times, self.warmup = times, warmup
        self._undo: list[Callable[[], None]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin, after the warm-up."""
        if batch_idx != self.warmup:
            return
        seconds = self.times.actions
        self._time(Stage, "forward_one_chunk", lambda stage, *_, **__: seconds[stage.stage_index, "F"])
        self._time(Stage, "backward_one_chunk", lambda stage, *_, full_backward=True, **__: seconds[stage.stage_index, "IB"[full_backward]])
        self._time(Stage, "backward_weight_one_chunk", lambda stage, *_, **__: seconds[stage.stage_index, "W"])
        self._time(trainer.strategy._train, "_loss", lambda *_: seconds[-1, "loss"])
        self._time(TrainingRunner, "run", lambda *_: self.times.steps, before=dist.barrier)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Take the clocks away: the process is used again."""
        for undo in self._undo:
            undo()

    def _time(self, owner: Any, name: str, log: Callable[..., list[float]], before: Callable[[], Any] = lambda: None) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before()
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            log(*args, **kwargs).append(time.perf_counter() - start)
            return result

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, inner))


def summary(ranks: list[Times], engine: str, virtual: int, microbatches: int) -> dict[str, Any]:
    """The figures of a schedule."""
    seconds = {key: mean(values) for times in ranks for key, values in times.actions.items()}
    last = RANKS * virtual - 1
    seconds[last, "F"] += seconds.pop((-1, "loss"))

    def duration(action: Action) -> float:
        return seconds[action.stage, action.kind]

    rows = actions(engine, RANKS, virtual, microbatches)
    ideal_s = makespan(simulate(rows, duration))
    busy_s = sum(duration(action) for row in rows for action in row)
    steps = [max(step) for step in zip(*(times.steps for times in ranks), strict=True)]
    kinds = {kind for _, kind in seconds}
    return {
        "virtual_stages": virtual,
        "step_s": spread(steps),
        "ideal_s": ideal_s,
        "ratio": spread([step / ideal_s for step in steps]),
        "bubble": 1 - busy_s / (RANKS * spread(steps)["median"]),
        "ideal_bubble": 1 - busy_s / (RANKS * ideal_s),
        "formula": (RANKS - 1) / (microbatches * virtual + RANKS - 1),
        # Of one microbatch on one rank; stage 0 has no input to find gradients for, so torch runs its whole backward as W.
        "work_s": {
            kind: sum(s for (stage, k), s in seconds.items() if k == kind and (kind == "F" or stage)) / RANKS for kind in sorted(kinds)
        },
    }


def bubble_of(engine: str, virtual: int, ranks: int, microbatches: int, work_s: dict[str, float]) -> float:
    """The bubble with stages of equal work."""
    stages = RANKS * virtual  # of which all but the first have backwards in the measured work
    each = {kind: value * RANKS / (stages if kind == "F" else stages - 1) for kind, value in work_s.items()}

    def duration(action: Action) -> float:
        if action.stage == 0 and action.kind in "IW":
            return 0.0 if action.kind == "I" else each["I"] + each["W"]
        return each[action.kind]

    timeline = simulate(actions(engine, ranks, virtual, microbatches), duration)
    return 1 - sum(timed.end - timed.start for timed in timeline) / (ranks * makespan(timeline))


def show(results: dict[str, Any], microbatches: int) -> None:
    table = Table("schedule", title=f"a step on {RANKS} ranks, {microbatches} microbatches: medians (and quartiles)")
    for column in ("stages a rank", "seconds", "ideal", "ratio", "target", "bubble", "of the ideal", "formula"):
        table.add_column(column, justify="right")
    for name, row in results["measured"].items():
        bubbles = (f"{row[key]:.1%}" for key in ("bubble", "ideal_bubble", "formula"))
        seconds = (shown(row["step_s"], 3), f"{row['ideal_s']:.3f}", shown(row["ratio"]), f"<= {TARGET:.2f}")
        table.add_row(name, str(row["virtual_stages"]), *seconds, *bubbles)
    Console(width=140).print(table)
    simulated = Table("schedule", title="bubble, simulated: ranks, with 4 microbatches a rank")
    ranks = list(next(iter(results["simulated"].values())))
    for each in ranks:
        simulated.add_column(str(each), justify="right")
    for name, row in results["simulated"].items():
        simulated.add_row(name, *(f"{row[each]:.1%}" for each in ranks))
    Console(width=140).print(simulated)


if __name__ == "__main__":
    main()
