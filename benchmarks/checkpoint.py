"""Saving and loading a checkpoint against plain `torch.save` and `torch.load` of the same state, and what training waits for.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--layouts "dp=1" "dp=2"] [--repeats 5 --hidden 768 --folder /tmp]

Prints a table and writes benchmarks/results/checkpoint.json. By turns in the same run: the plain save is one file,
written by rank 0 of the replicas, flushed and fsynced, as ours are; the plain load is `torch.load` and `load_state_dict` of model and
optimizer on every rank, which looks at no checksums, where ours does. What was just written is read from the page cache, by both. All
ranks begin together, and the slowest counts.

Then the same run goes on, with and without `async_checkpoint`'s saves by turns: `--steps` steps, then as many that begin with a save,
then a save in the foreground, of which are shares: the stall, until `save` returns; the wait before the optimizer, for what is left of the
copy; and the loss, both of them and the slower steps: what steps with a save take longer than those before and after.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from figures import against_neighbours, shown, spread, write
from layouts import layout
from measure import Replica, Setting, bare_trainer, quiet
from rich.console import Console
from rich.table import Table

from lightning_3d.checkpoint import Saver, remove, restore
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.testing import RankPool

SIZES = {"hidden": 768, "layers": 6, "heads": 12, "kv_heads": 6, "ffn": 2048, "vocabulary": 8192, "sequence": 32}
SIZES |= {"micro_batch": 1, "accumulation": 2}  # a step is longer than the copy, but not so long that the loss is within its noise
LAYOUTS = ("dp=1", "dp=2", "pp=2")
TARGETS = {"save": ">= 0.90", "load": ">= 0.90", "stall": "<= 0.10", "wait": "", "loss": "", "disk": "<= 1.02"}
HOUR_S = 3600.0
FOLDER = "step-1"

Taken = dict[str, list[float]]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS[:2], choices=LAYOUTS, metavar="LAYOUT", help="of %(choices)s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; null: that of temporary files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/checkpoint.json")
    for each in fields(Setting):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=SIZES.get(each.name, each.default))
    parsed = parser.parse_args(argv)
    setting = Setting(**{each.name: getattr(parsed, each.name) for each in fields(Setting)})
    results = {name: measure(name, setting, parsed.repeats, parsed.folder) for name in parsed.layouts}
    show(results)
    write(parsed.output, results, asdict(setting))


def measure(name: str, setting: Setting, repeats: int, folder: str | None) -> dict[str, Any]:
    """The figures of a layout, in processes of its own."""
    arguments = layout(name)
    world_size = arguments.get("dp", 1) * arguments.get("tp", 1) * arguments.get("pp", 1)
    with RankPool() as pool, TemporaryDirectory(dir=folder) as place:
        ranks = pool.run(fit, world_size, (setting, arguments, repeats, place), timeout_s=HOUR_S)
        written = sum(path.stat().st_size for path in (Path(place) / FOLDER).iterdir())
    slowest = {name: [max(each) for each in zip(*(taken[name] for taken, _ in ranks), strict=True)] for name in ranks[0][0]}
    return figures(slowest, written, 3 * 4 * ranks[0][1])


def fit(setting: Setting, arguments: dict[str, Any], repeats: int, place: str) -> tuple[Taken, int]:
    """Train, and measure on the way; on every rank. Seconds, and the number of parameters."""
    quiet()
    strategy = ThreeDStrategy(batch_accumulation_per_replica=setting.accumulation, **arguments)
    beside, training = BesidePlain(repeats, Path(place)), WhileTraining(setting.steps, 2 * repeats + 1, Path(place))
    trainer = bare_trainer(strategy, max_steps=1 + training.steps * training.segments, callbacks=[beside, training])
    trainer.fit(LlamaModule(setting.llama, AdamW(lr_decay_style="constant")), Replica(setting, strategy))
    return beside.taken | training.taken, strategy.parameter_counts()[0]


class BesidePlain(pl.Callback):
    """After the first step, when there are moments: saves and loads, ours and plain, one after the other."""

    def __init__(self, repeats: int, place: Path) -> None:
        self.repeats, self.place = repeats, place
        self.taken: Taken = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure; what is saved and loaded is the same each time."""
        if batch_idx:
            return
        (optimizer,) = trainer.optimizers
        ours, plain = self.place / FOLDER, self.place / f"plain-{trainer.strategy.mesh.coord.pp}.pt"
        actions: dict[str, Callable[[], float]] = {
            "plain save": lambda: seconds(lambda: save_plain(plain, module, optimizer, writes=trainer.strategy.mesh.coord.dp == 0)),
            "save": lambda: save(trainer, ours, trainer.strategy.saver),
            "plain load": lambda: seconds(lambda: load_plain(plain, module, optimizer)),
            "load": lambda: seconds(lambda: restore(str(ours), module, [optimizer])),
        }
        for action in actions.values():  # files are new
            action()
        self.taken = {name: [action()] if name.startswith("plain") else [] for name, action in actions.items()}
        for _ in range(self.repeats):
            for name in ("save", "plain save", "load", "plain load"):
                self.taken[name].append(actions[name]())


class Timed(Saver):
    """Takes the time that training waits before the optimizer."""

    waited_s = 0.0

    def wait_for_copy(self) -> None:
        """What training waits for."""
        start = time.perf_counter()
        super().wait_for_copy()
        self.waited_s += time.perf_counter() - start


class WhileTraining(pl.Callback):
    """After the first step: segments of some steps, every second of which begins with a save in the background."""

    def __init__(self, steps: int, segments: int, place: Path) -> None:
        self.steps, self.segments, self.folder = steps, segments, place / FOLDER
        self.taken: Taken = {name: [] for name in ("steps", "steps with a save", "stall", "wait", "save between steps")}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """What saves in the background, and what in the foreground."""
        self._foreground, self._background = trainer.strategy.saver, Timed(in_background=True)
        self._background.connect()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A segment ends here, and the next one begins."""
        done, inside = divmod(batch_idx, self.steps)
        if inside:
            return
        if done:
            self._end(trainer, with_save=done % 2 == 0)
        else:
            for _ in range(2):  # buffers are new, and the first does not know what this rank writes
                save(trainer, self.folder, self._background)
        if done < self.segments:
            self._begin(trainer, with_save=done % 2 == 1)

    def _begin(self, trainer: Any, *, with_save: bool) -> None:
        dist.barrier()
        self._start_s, self._background.waited_s = time.perf_counter(), 0.0
        if with_save:
            self.taken["stall"].append(save(trainer, self.folder, self._background, waits=False))

    def _end(self, trainer: Any, *, with_save: bool) -> None:
        dist.barrier()
        self.taken["steps with a save" if with_save else "steps"].append(time.perf_counter() - self._start_s)
        if with_save:
            self.taken["wait"].append(self._background.waited_s)
            self._background.wait()
            self.taken["save between steps"].append(save(trainer, self.folder, self._foreground))


def save(trainer: Any, folder: Path, saver: Saver, *, waits: bool = True) -> float:
    """Seconds until it returns."""
    trainer.strategy.saver = saver
    dist.barrier()
    if dist.get_rank() == 0:
        remove(folder)
    taken = seconds(lambda: trainer.save_checkpoint(folder))
    if waits:
        saver.wait()
    return taken


def figures(taken: Taken, written: int, held: int) -> dict[str, Any]:
    """Medians of seconds, and ratios to the neighbours in time; ``held`` is parameters and two moments, in float32."""
    ratios = {name: spread([1 / ratio for ratio in against_neighbours(taken[name], taken[f"plain {name}"])]) for name in ("save", "load")}
    without = [(before + after) / 2 for before, after in pairwise(taken["steps"])]
    loss = [more - less for more, less in zip(taken["steps with a save"], without, strict=True)]
    for name, values in {"stall": taken["stall"], "wait": taken["wait"], "loss": loss}.items():
        ratios[name] = spread([value / saved for value, saved in zip(values, taken["save between steps"], strict=True)])
    return {
        "seconds": {name: spread(values) for name, values in (taken | {"loss": loss}).items()},
        "state_nbytes": held,
        "ratio": ratios | {"disk": written / held},
    }


def seconds(action: Callable[[], Any]) -> float:
    """From when all ranks are here until the last one is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def save_plain(path: Path, module: LlamaModule, optimizer: torch.optim.Optimizer, *, writes: bool) -> None:
    """What a script without shards does, to the disk as ours."""
    if not writes:
        return
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def load_plain(path: Path, module: LlamaModule, optimizer: torch.optim.Optimizer) -> None:
    """What such a script does to go on."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table("layout", "", title="against torch.save and torch.load: medians [and quartiles]")
    for column in ("seconds", "GB/s", "plain: seconds", "ratio of bandwidths", "target"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        for way in ("save", "load"):
            ours, plain = row["seconds"][way], row["seconds"][f"plain {way}"]
            speed = f"{row['state_nbytes'] / ours['median'] / 1e9:.2f}"
            table.add_row(name, way, shown(ours), speed, shown(plain), shown(row["ratio"][way]), TARGETS[way])
        for share, what in {"stall": "in the background: stall", "wait": "wait before the optimizer", "loss": "all that is lost"}.items():
            ratio = shown(row["ratio"][share], 3) + " of a save"
            table.add_row("", what, shown(row["seconds"][share], 3), "", "", ratio, TARGETS[share])
        table.add_row("", "bytes on disk", "", "", "", f"{row['ratio']['disk']:.4f} of the state", TARGETS["disk"])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
