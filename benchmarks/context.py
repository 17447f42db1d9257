"""Tokens/s, CPU-seconds and peak memory of each method of context parallelism as sequences grow, against one rank that holds them whole.

    OMP_NUM_THREADS=1 python benchmarks/context.py [--sequences 1024 4096] [--layouts "cp=2 cp_method=ring"] [--segments 16 ...]

Prints a table and writes benchmarks/results/context.json. Blocks are recomputed by default, since sequences are long where cp is of use;
then a rank's memory is that of its part of the sequence and, for allgather and ulysses, of what they gather. The plain loop, which takes
turns with each layout, recomputes nothing. `MiB` is how much the resident set of the fullest rank grew (measure.growth), weights and
optimizer state, which cp does not split, included.
"""

from argparse import ArgumentParser
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import against_neighbours, shown, spread, write
from layouts import HOUR_S, layout
from measure import Costs, Setting, fit, growth, options
from rich.console import Console
from rich.table import Table

from lightning_3d.parallel.context import CONTEXT_METHODS
from lightning_3d.testing import RankPool

WHOLE = "cp=1"
LAYOUTS = [WHOLE, *(f"cp=2 cp_method={method}" for method in CONTEXT_METHODS)]
OTHERS = [f"cp=4 cp_method={method}" for method in CONTEXT_METHODS]
SEQUENCES = [1024, 2048, 4096]
SIZES = {"layers": 1, "vocabulary": 1024, "micro_batch": 1, "accumulation": 1, "warmup": 1, "steps": 1, "segments": 6}


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, *OTHERS], default=LAYOUTS, metavar="LAYOUT", help="of %(choices)s")
    parser.add_argument("--recompute", default="full", help="of the strategy")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/context.json")
    parsed, setting = options(parser, argv, SIZES)
    cases = [(str(length), name) for length in parsed.sequences for name in parsed.layouts]
    results: dict[str, dict[str, Any]] = {length: {} for length, _ in cases}
    with RankPool() as timing, RankPool() as weighing:  # two: the second's allocator is slow
        for name in parsed.layouts:  # what libraries take when they are first used is in no figure
            weigh(weighing, name, replace(setting, sequence=64), parsed.recompute)
        for length, name in cases:
            case = name, replace(setting, sequence=int(length)), parsed.recompute
            results[length][name] = speed(timing, *case) | {"peak_mib": weigh(weighing, *case)}
    show(results)
    write(parsed.output, results, asdict(setting) | {"recompute": parsed.recompute})


def speed(pool: RankPool, name: str, setting: Setting, recompute: str) -> dict[str, Any]:
    """Time of a layout."""
    arguments = layout(name)
    run = partial(fit, company=False)
    ranks = pool.run(run, arguments["cp"], (setting, arguments | {"recompute": recompute}), timeout_s=HOUR_S)
    return summary(ranks, setting.segment_tokens)


def weigh(pool: RankPool, name: str, setting: Setting, recompute: str) -> float:
    """MiB of a layout's fullest rank."""
    arguments = layout(name)
    case = replace(setting, steps=2), arguments | {"recompute": recompute}
    return max(pool.run(growth, arguments["cp"], case, timeout_s=HOUR_S)) / 2**20


def summary(ranks: list[Costs], tokens: int) -> dict[str, Any]:
    """The times of a layout; a segment trains ``tokens``, in the plain loop of rank 0 and on all ranks together."""
    ours = [sum(costs) for costs in zip(*([cost.cpu_s for cost in rank.ours] for rank in ranks), strict=True)]
    wall, alone = ([cost.wall_s for cost in costs] for costs in (ranks[0].ours, ranks[0].alone))
    return {
        "tokens_per_s": tokens / median(wall),
        "speed_ratio": spread([1 / ratio for ratio in against_neighbours(wall, alone)]),
        "ratio": spread(against_neighbours(ours, [cost.cpu_s for cost in ranks[0].alone])),
    }


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table(
        "sequence", "layout", title="context parallelism: medians (and quartiles); the plain loop holds all and recomputes nothing"
    )
    for column in ("tokens/s", "of the plain loop's", "CPU-s a token, of the plain loop's", "MiB a rank", "of cp=1"):
        table.add_column(column, justify="right")
    for length, rows in results.items():
        for name, row in rows.items():
            part = f"{row['peak_mib'] / rows[WHOLE]['peak_mib']:.2f}" if rows.get(WHOLE, {}).get("peak_mib") else ""
            speeds = f"{row['tokens_per_s']:,.0f}", shown(row["speed_ratio"])
            table.add_row(length, name, *speeds, shown(row["ratio"]), f"{row['peak_mib']:,.0f}", part)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
