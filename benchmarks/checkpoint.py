"""Saving and loading a checkpoint against plain `torch.save` and `torch.load` of the same state, and what training waits for.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--layouts "dp=1" "dp=2"] [--repeats 5 --hidden 768 --folder /tmp]

Prints a table and writes benchmarks/results/checkpoint.json. By turns in the same run: the plain save is one file,
written by rank 0 of the replicas, flushed and fsynced, as ours are; the plain load is `torch.load` and `load_state_dict` of model and
optimizer on every rank, which looks at no checksums, where ours does. What was just written is read from the page cache, by both. All
ranks begin together, and the slowest counts. A stall is what `save` with `async_checkpoint` keeps training from, over the save in the
foreground before it.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, fields
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
LAYOUTS = ("dp=1", "dp=2", "pp=2")
TARGETS = {"save": ">= 0.90", "load": ">= 0.90", "stall": "<= 0.10", "disk": "<= 1.02"}
HOUR_S = 3600.0


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
        return pool.run(fit, world_size, (setting, arguments, repeats, place), timeout_s=HOUR_S)[0]


def fit(setting: Setting, arguments: dict[str, Any], repeats: int, place: str) -> dict[str, Any]:
    """Train one step, so that there are moments, then measure; on every rank."""
    quiet()
    strategy = ThreeDStrategy(batch_accumulation_per_replica=setting.accumulation, **arguments)
    turns = TakeTurns(repeats, Path(place))
    trainer = bare_trainer(strategy, max_steps=1, callbacks=[turns])
    trainer.fit(LlamaModule(setting.llama, AdamW(lr_decay_style="constant")), Replica(setting, strategy))
    return turns.figures


class TakeTurns(pl.Callback):
    """When the step is done: saves and loads, ours and plain, one after the other."""

    def __init__(self, repeats: int, place: Path) -> None:
        self.repeats, self.place = repeats, place
        self.figures: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Measure; what is saved and loaded is the same each time."""
        (optimizer,) = trainer.optimizers
        ours, plain = self.place / "step-1", self.place / f"plain-{trainer.strategy.mesh.coord.pp}.pt"
        foreground, background = trainer.strategy.saver, Saver(in_background=True)
        background.connect()

        def save(saver: Saver) -> float:
            trainer.strategy.saver = saver
            dist.barrier()
            if dist.get_rank() == 0:
                remove(ours)
            taken = seconds(lambda: trainer.save_checkpoint(ours))
            saver.wait()
            return taken

        actions: dict[str, Callable[[], float]] = {
            "plain save": lambda: seconds(lambda: save_plain(plain, module, optimizer, writes=trainer.strategy.mesh.coord.dp == 0)),
            "save": lambda: save(foreground),
            "plain load": lambda: seconds(lambda: load_plain(plain, module, optimizer)),
            "load": lambda: seconds(lambda: restore(str(ours), module, [optimizer])),
            "stall": lambda: save(background),
        }
        warm = {name: action() for name, action in actions.items()}  # files and buffers are new
        taken = {name: [action()] for name, action in actions.items() if name.startswith("plain")}
        taken |= {name: [] for name in actions if name not in taken}
        for _ in range(self.repeats):
            for name in ("save", "plain save", "load", "plain load", "stall"):
                taken[name].append(actions[name]())
        written = sum(path.stat().st_size for path in ours.iterdir())
        numel, _ = trainer.strategy.parameter_counts()
        self.figures = figures(taken, warm["stall"], written, 3 * 4 * numel)


def figures(taken: dict[str, list[float]], first_stall_s: float, written: int, held: int) -> dict[str, Any]:
    """Medians of seconds, and ratios to the neighbours in time; ``held`` is parameters and two moments, in float32."""
    ratios = {name: spread([1 / ratio for ratio in against_neighbours(taken[name], taken[f"plain {name}"])]) for name in ("save", "load")}
    stall = [stalled / saved for stalled, saved in zip(taken["stall"], taken["save"], strict=True)]
    return {
        "seconds": {name: spread(values) for name, values in taken.items()} | {"first stall": first_stall_s},
        "state_nbytes": held,
        "ratio": ratios | {"stall": spread(stall), "disk": written / held},
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
        stall = shown(row["ratio"]["stall"], 3) + " of a save"
        table.add_row("", "stall in the background", shown(row["seconds"]["stall"], 3), "", "", stall, TARGETS["stall"])
        table.add_row("", "bytes on disk", "", "", "", f"{row['ratio']['disk']:.4f} of the state", TARGETS["disk"])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
