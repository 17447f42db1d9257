"""How soon the command line answers: ``python -m lightning_3d --help`` against importing what it stands on.

    python benchmarks/startup.py [--repeats 9]

Prints a table and writes benchmarks/results/startup.json. ``import lightning.pytorch, transformers`` alone takes seconds, so heavy
imports are deferred to the commands that need them; target: at most 1.3 times its time.
"""

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from figures import Cost, against_neighbours, shown, spread, write
from rich.console import Console
from rich.table import Table

TARGET = 1.3
IMPORTS = ("-c", "import lightning.pytorch, transformers")
COMMANDS = {"--help": ("-m", "lightning_3d", "--help"), "fit --help": ("-m", "lightning_3d", "fit", "--help")}


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/startup.json")
    parsed = parser.parse_args(argv)
    imports, costs = [start(*IMPORTS)], {name: [] for name in COMMANDS}
    for _ in range(parsed.repeats):
        for name, command in COMMANDS.items():
            costs[name].append(start(*command))
        imports.append(start(*IMPORTS))
    results = {name: figures(costs[name], imports) for name in COMMANDS}
    show(results, imports)
    write(parsed.output, {"imports": {"wall_s": spread([c.wall_s for c in imports])}, "commands": results, "target": TARGET})


def start(*arguments: str) -> Cost:
    """Run Python once, to its end."""
    wall, cpu = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent.parent)
    end = os.times()
    spent = end.children_user + end.children_system - cpu.children_user - cpu.children_system
    return Cost(time.perf_counter() - wall, spent)


def figures(costs: list[Cost], imports: list[Cost]) -> dict[str, dict[str, float]]:
    """Seconds, and ratios to the imports before and after."""
    wall, cpu = [c.wall_s for c in costs], [c.cpu_s for c in costs]
    return {
        "wall_s": spread(wall),
        "ratio": spread(against_neighbours(wall, [c.wall_s for c in imports])),
        "cpu_ratio": spread(against_neighbours(cpu, [c.cpu_s for c in imports])),
    }


def show(results: dict[str, dict[str, dict[str, float]]], imports: list[Cost]) -> None:
    table = Table("python ...", "seconds", "ratio", "ratio of CPU-seconds", "target", title="start-up")
    table.add_row(" ".join(IMPORTS), shown(spread([c.wall_s for c in imports])), "1", "1", "")
    for name, row in results.items():
        target = f"<= {TARGET}" if name == "--help" else ""
        table.add_row(" ".join(COMMANDS[name]), shown(row["wall_s"]), shown(row["ratio"]), shown(row["cpu_ratio"]), target)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
