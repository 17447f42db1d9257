"""Compiled blocks against eager ones: what the start costs, with an empty and with a filled cache, and what a step costs later.

    OMP_NUM_THREADS=1 python benchmarks/compile.py [--segments 30 --hidden 512 ...]

Prints a table and writes benchmarks/results/compile.json. Each row is a process of its own. What the start costs is how much longer the
steps before the first segment took than as many later ones: tracing, compiling, and what any first step costs. A later step is compared
with the plain eager loop that takes turns with it.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from figures import against_neighbours, shown, spread, write
from measure import Setting, fit, options
from rich.console import Console
from rich.table import Table


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/compile.json")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--row", choices=["eager", "compiled"], help="measure this one here, into the output")
    parsed, setting = options(parser, argv)
    if parsed.row:
        parsed.output.write_text(json.dumps(row(setting, parsed.backend if parsed.row == "compiled" else False)))
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("eager", "compiled, empty cache", "compiled, filled cache"):
            rows[name] = in_process(name.split(",")[0], Path(folder), sys.argv[1:] if argv is None else argv)
    show(rows)
    write(parsed.output, rows, asdict(setting))


def in_process(row: str, folder: Path, argv: list[str]) -> Any:
    """Measure in a process whose cache is in the folder."""
    output = folder / "row.json"
    command = [sys.executable, __file__, *argv, "--row", row, "--output", str(output)]
    subprocess.run(command, check=True, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")})
    return json.loads(output.read_text())


def row(setting: Setting, compile_with: str | bool) -> dict[str, Any]:
    """Seconds of the start, and of a later step: as such and as a multiple of the plain loop's."""
    costs = fit(setting, {"compile": compile_with})
    step_s = median(cost.wall_s for cost in costs.ours) / setting.steps
    ratio = against_neighbours([c.wall_s for c in costs.ours], [c.wall_s for c in costs.alone])
    return {"start_s": costs.warmup_s - setting.warmup * step_s, "step_s": step_s, "ratio": spread(ratio)}


def show(rows: dict[str, Any]) -> None:
    table = Table("blocks", "start, s", "a later step, ms", "of the plain loop's", title="one process")
    for name, each in rows.items():
        table.add_row(name, f"{each['start_s']:.1f}", f"{1e3 * each['step_s']:.0f}", shown(each["ratio"], 3))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
