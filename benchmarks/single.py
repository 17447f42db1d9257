"""Trainer.fit with ThreeDStrategy on one process against a plain PyTorch loop of the same model, in turns.

    OMP_NUM_THREADS=1 python benchmarks/single.py [--segments 30 --hidden 512 ...]

Prints a table and writes benchmarks/results/single.json. What the loop lacks is Lightning's hooks, the hand-over of the gradients and the
metrics; target: at least 0.97 of its tokens per second.
"""

from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from statistics import median

from figures import Cost, against_neighbours, shown, spread, write
from measure import Setting, fit, options
from rich.console import Console
from rich.table import Table

TARGET = 0.97


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/single.json")
    parsed, setting = options(parser, argv)
    costs = fit(setting, {})
    speed = {"Trainer.fit": rates(setting, costs.ours), "plain loop": rates(setting, costs.alone)}
    wall = [1 / ratio for ratio in against_neighbours([c.wall_s for c in costs.ours], [c.wall_s for c in costs.alone])]
    cpu = [1 / ratio for ratio in against_neighbours([c.cpu_s for c in costs.ours], [c.cpu_s for c in costs.alone])]
    ratios = {"tokens_per_s": spread(wall), "tokens_per_cpu_s": spread(cpu)}
    show(speed, ratios)
    write(parsed.output, {"speed": speed, "ratio": ratios, "target": TARGET}, asdict(setting))


def rates(setting: Setting, costs: list[Cost]) -> dict[str, float]:
    """Medians over the segments."""
    tokens = setting.segment_tokens
    return {"tokens_per_s": tokens / median(c.wall_s for c in costs), "tokens_per_cpu_s": tokens / median(c.cpu_s for c in costs)}


def show(speed: dict[str, dict[str, float]], ratios: dict[str, dict[str, float]]) -> None:
    table = Table("", "tokens/s", "tokens/CPU-s", title="one process")
    for name, row in speed.items():
        table.add_row(name, *(f"{value:,.0f}" for value in row.values()))
    table.add_row("ratio", *(shown(value, 3) for value in ratios.values()))
    table.add_row("target", f">= {TARGET}", f">= {TARGET}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
