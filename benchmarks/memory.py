"""Peak memory of each rank of a pipeline: schedules and what saves activations, with few and with many microbatches.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--settings 1f1b afab] [--microbatches 4 16 --hidden 256 ...]

Prints a table and writes benchmarks/results/memory.json. Two ranks; the peak is how much the resident set of a rank grew from before the
model to the end: weights, gradients and moments are in it, what the allocator keeps is not (measure.growth). The rows of a microbatch
stay the same, so with 4 times as many of them a batch is 4 times as large: under 1F1B the peak stays, under afab it grows with the batch.
"""

from argparse import ArgumentParser
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from figures import write
from layouts import HOUR_S
from measure import Setting, growth, options
from rich.console import Console
from rich.table import Table

from lightning_3d.parallel.schedules import ENGINES, actions
from lightning_3d.parallel.timeline import most_held
from lightning_3d.testing import RankPool

RANKS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "afab": {"pp_engine": "afab"},
    "1f1b": {"pp_engine": "1f1b"},
    "interleaved_1f1b": {"pp_engine": "interleaved_1f1b", "virtual_stages": 2},
    "zbv": {"pp_engine": "zbv", "virtual_stages": 2},
    "1f1b, recompute=full": {"pp_engine": "1f1b", "recompute": "full"},
    "1f1b, recompute=selective": {"pp_engine": "1f1b", "recompute": "selective"},
    "1f1b, loss_chunks=8": {"pp_engine": "1f1b", "loss_chunks": 8},
}
SIZES = {"layers": 8, "vocabulary": 8192, "steps": 2}


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING", help="of %(choices)s")
    parser.add_argument("--microbatches", nargs=2, type=int, default=(4, 16))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/memory.json")
    parsed, setting = options(parser, argv, SIZES)
    with RankPool() as pool:
        run(pool, replace(setting, steps=1, sequence=16), {})  # what libraries take when they are first used is in no figure
        results = {name: measure(name, pool, setting, parsed.microbatches) for name in parsed.settings}
    show(results)
    write(parsed.output, results, asdict(setting))


def measure(name: str, pool: RankPool, setting: Setting, microbatches: tuple[int, int]) -> dict[str, Any]:
    """MiB of each rank, and the forwards whose activations its schedule keeps at one time, by the number of microbatches."""
    chosen, figures = SETTINGS[name], dict[str, Any]()
    engine = chosen["pp_engine"]
    virtual = chosen.get("virtual_stages", ENGINES[engine].virtual_stages[0])
    for count in microbatches:
        peaks = run(pool, replace(setting, accumulation=count), chosen)
        held = [most_held(row) / virtual for row in actions(engine, RANKS, virtual, count)]
        figures[str(count)] = {"peak_mib": [peak / 2**20 for peak in peaks], "held": held}
    few, many = (max(figures[str(count)]["peak_mib"]) for count in microbatches)
    return figures | {"growth": many / max(few, 1e-9)}


def run(pool: RankPool, setting: Setting, chosen: dict[str, Any]) -> list[int]:
    """The most bytes that each rank holds."""
    layout = {key: value for key, value in chosen.items() if key != "loss_chunks"}
    return pool.run(growth, RANKS, (setting, {"pp": RANKS} | layout, chosen.get("loss_chunks", 1)), timeout_s=HOUR_S)


def show(results: dict[str, dict[str, Any]]) -> None:
    counts = [key for key in next(iter(results.values())) if key != "growth"]
    table = Table("setting", title="growth of the resident set of each rank; forwards through all its stages that the schedule keeps")
    for count in counts:
        table.add_column(f"MiB, m={count}", justify="right")
        table.add_column("kept", justify="right")
    table.add_column("growth", justify="right")
    for name, row in results.items():
        cells = []
        for count in counts:
            cells += [" / ".join(f"{peak:,.0f}" for peak in row[count]["peak_mib"]), " / ".join(f"{held:g}" for held in row[count]["held"])]
        table.add_row(name, *cells, f"{row['growth']:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
