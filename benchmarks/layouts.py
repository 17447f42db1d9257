"""Tokens/s, peak memory and CPU-seconds of each layout, against the plain one-process loop in the same run.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py [--layouts "tp=2" "tp=2 pp=2"] [--segments 30 --hidden 512 ...]

Prints a table and writes benchmarks/results/layouts.json. The ratio is CPU-seconds (user + system of all ranks) per 1,000 tokens over
those of the plain loop: it does not ask how many cores there are, and 1.00 would be a split that costs nothing.
"""

from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from figures import against_neighbours, shown, spread, write
from measure import Costs, Setting, fit, options
from rich.console import Console
from rich.table import Table

from lightning_3d.testing import RankPool

# Layout -> the ratio not to be exceeded; what has none is run when it is asked for by name.
TARGETS = {"dp=2": 1.10, "tp=2": 1.45, "pp=2": 1.00, "dp=2 tp=2": 1.65, "tp=2 pp=2": 1.65}
OTHERS = ["tp=2 sequence_parallel=1", "dp=2 data_parallel=zero2", "dp=2 data_parallel=fsdp", "dp=2 tp=2 pp=2"]
HOUR_S = 3600.0


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=[*TARGETS, *OTHERS], default=list(TARGETS), metavar="LAYOUT", help="of %(choices)s")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/layouts.json")
    parsed, setting = options(parser, argv)
    results = {name: measure(name, setting) for name in parsed.layouts}
    show(results)
    write(parsed.output, results, asdict(setting))


def layout(name: str) -> dict[str, Any]:
    """The strategy's arguments."""
    pairs = (part.split("=") for part in name.split())
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """Run a layout in processes of its own, so that its peak of memory is its own."""
    arguments = layout(name)
    sizes = {key: arguments.get(key, 1) for key in ("dp", "tp", "pp")}
    with RankPool() as pool:
        ranks = pool.run(fit, sizes["dp"] * sizes["tp"] * sizes["pp"], (setting, arguments), timeout_s=HOUR_S)
    return summary(ranks, setting.segment_tokens, sizes["dp"]) | {"target": TARGETS.get(name)}


def summary(ranks: list[Costs], tokens: int, dp: int) -> dict[str, Any]:
    """The figures of a layout; a segment trains ``tokens`` in the plain loop, and dp times as many in the layout."""
    alone = [cost.cpu_s for cost in ranks[0].alone]
    ours = [sum(costs) / dp for costs in zip(*([c.cpu_s for c in rank.ours] for rank in ranks), strict=True)]
    at_once = [sum(costs) / len(ranks) for costs in zip(*([c.cpu_s for c in rank.at_once] for rank in ranks), strict=True)]
    return {
        "tokens_per_s": dp * tokens / median(cost.wall_s for cost in ranks[0].ours),
        "plain_tokens_per_s": tokens / median(cost.wall_s for cost in ranks[0].alone),
        "peak_mib": max(rank.peak_nbytes for rank in ranks) / 2**20,
        "cpu_s_per_1000_tokens": 1000 * median(ours) / tokens,
        "plain_cpu_s_per_1000_tokens": 1000 * median(alone) / tokens,
        "ratio": spread(against_neighbours(ours, alone)),
        "plain_at_once_ratio": spread([both / one for both, one in zip(at_once, alone, strict=True)]),
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table("layout", title="against the plain one-process loop: medians (and quartiles)")
    for column in ("tokens/s", "plain", "MiB a rank", "CPU-s per 1,000", "plain", "ratio", "target", "plain on all ranks"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        speed = (f"{row['tokens_per_s']:,.0f}", f"{row['plain_tokens_per_s']:,.0f}", f"{row['peak_mib']:,.0f}")
        cpu = (f"{row['cpu_s_per_1000_tokens']:.3f}", f"{row['plain_cpu_s_per_1000_tokens']:.3f}", shown(row["ratio"]))
        table.add_row(name, *speed, *cpu, f"<= {row['target']:.2f}" if row["target"] else "", shown(row["plain_at_once_ratio"]))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
