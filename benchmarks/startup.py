"""How long ``python -m lightning_3d --help`` takes, against importing lightning.pytorch and transformers.

    python benchmarks/startup.py

Whole processes by turns, after one of each that is not counted. Target: at most 1.3 times as long.
"""

import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from measure import spread, write
from rich.console import Console
from rich.table import Table

TARGET = 1.3
COMMANDS = {
    "help": ["-m", "lightning_3d", "--help"],
    "fit_help": ["-m", "lightning_3d", "fit", "--help"],
    "imports": ["-c", "import lightning.pytorch, transformers"],
}


def wall_s(arguments: list[str]) -> float:
    """Seconds of a whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/startup.json"), help="where to write the figures as JSON")
    options = parser.parse_args(argv)
    for arguments in COMMANDS.values():
        wall_s(arguments)
    rounds = [{name: wall_s(arguments) for name, arguments in COMMANDS.items()} for _ in range(options.runs)]
    figures = {f"{name}_s": spread([times[name] for times in rounds]) for name in COMMANDS}
    for name in ("help", "fit_help"):
        figures[f"{name}_ratio"] = spread([times[name] / times["imports"] for times in rounds])
    table = Table("figure", "low quartile", "median", "high quartile", "target")
    for name, figure in figures.items():
        table.add_row(name, *(f"{figure[key]:.2f}" for key in ("low", "median", "high")), f"<= {TARGET}" if name == "help_ratio" else "")
    Console().print(table)
    write(options.output, figures, target=TARGET)


if __name__ == "__main__":
    main()
