"""Tokens/s, CPU-seconds and peak memory of each method of context parallelism as sequences grow, against one rank that holds them whole.

    OMP_NUM_THREADS=1 python benchmarks/context.py [--sequences 1024 4096] [--layouts "cp=2 cp_method=ring"] [--segments 6 ...]

Prints a table and writes benchmarks/results/context.json. Blocks are recomputed by default, since sequences are long where cp is of use;
then a rank's memory is that of its part of the sequence and, for allgather and ulysses, of what they gather. `MiB` is how much the
resident set of a rank grew, weights and optimizer state (which cp does not split) included.
"""

from argparse import ArgumentParser
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from figures import against_neighbours, shown, spread, write
from layouts import HOUR_S, layout
from measure import Costs, Setting, fit, options
from rich.console import Console
from rich.table import Table

from lightning_3d.parallel.context import CONTEXT_METHODS
from lightning_3d.testing import RankPool

WHOLE = "cp=1"
LAYOUTS = [WHOLE, *(f"cp=2 cp_method={method}" for method in CONTEXT_METHODS)]
OTHERS = [f"cp=4 cp_method={method}" for method in CONTEXT_METHODS]
SEQUENCES = [1024, 2048, 4096]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, *OTHERS], default=LAYOUTS, metavar="LAYOUT", help="of %(choices)s")
    parser.add_argument("--recompute", default="full", help="of the strategy")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/context.json")
    parsed, setting = options(parser, argv)
    results = {
        str(length): {name: measure(name, replace(setting, sequence=length), parsed.recompute) for name in parsed.layouts}
        for length in parsed.sequences
    }
    show(results)
    write(parsed.output, results, asdict(setting) | {"recompute": parsed.recompute})


def measure(name: str, setting: Setting, recompute: str) -> dict[str, Any]:
    """Run a layout in processes of its own, so that its peak of memory is its own."""
    arguments = layout(name)
    with RankPool() as pool:
        ranks = pool.run(fit, arguments["cp"], (setting, arguments | {"recompute": recompute}), timeout_s=HOUR_S)
    return summary(ranks, setting.segment_tokens)


def summary(ranks: list[Costs], tokens: int) -> dict[str, Any]:
    """The figures of a layout; a segment trains ``tokens``, in the plain loop of rank 0 and on all ranks together."""
    ours = [sum(costs) for costs in zip(*([cost.cpu_s for cost in rank.ours] for rank in ranks), strict=True)]
    return {
        "tokens_per_s": tokens / median(cost.wall_s for cost in ranks[0].ours),
        "ratio": spread(against_neighbours(ours, [cost.cpu_s for cost in ranks[0].alone])),
        "peak_mib": max(rank.peak_nbytes for rank in ranks) / 2**20,
    }


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table("sequence", "layout", title="context parallelism: medians [and quartiles]")
    for column in ("tokens/s", "CPU-s per 1,000 against plain", "MiB a rank", "against cp=1"):
        table.add_column(column, justify="right")
    for length, rows in results.items():
        for name, row in rows.items():
            part = f"{row['peak_mib'] / rows[WHOLE]['peak_mib']:.2f}" if rows.get(WHOLE, {}).get("peak_mib") else ""
            table.add_row(length, name, f"{row['tokens_per_s']:,.0f}", shown(row["ratio"]), f"{row['peak_mib']:,.0f}", part)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
