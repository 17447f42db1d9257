"""Compiled against eager: what the start costs, with an empty and with a filled cache, and what each later time costs.

    OMP_NUM_THREADS=1 python benchmarks/compile.py [--segments 30 --hidden 512 ...]

Prints two tables and writes benchmarks/results/compile.json. The first is of training under the strategy, which compiles blocks: what the
start costs is how much longer the steps before the first segment took than as many later ones: tracing, compiling, and what any first step
costs. The second is of the parts alone, forward and backward, by turns with the same part eager: the block, and the loss and the norm,
which the strategy leaves eager outside of blocks. `first graph` is a function of no size, and bears what torch loads with its first graph.

Everything is measured in processes of its own, of which those with an empty cache leave it filled for those after them.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import against_neighbours, now, shown, since, spread, write
from measure import Setting, fit, options
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_3d.model.llama import Block
from lightning_3d.model.loss import token_losses
from lightning_3d.model.rope import RotaryTables

SIZES = {"segments": 10}
CALLS_S = 0.02  # of a part, at least, between two looks at the clock
Part = tuple[Callable[..., Any], tuple[Tensor, ...]]  # what is called, and with what


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/compile.json")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--repeats", type=int, default=40, help="of a part")
    parser.add_argument("--row", choices=["eager", "compiled", "parts"], help="measure this one here, into the output")
    parsed, setting = options(parser, argv, SIZES)
    if parsed.row == "parts":
        parsed.output.write_text(json.dumps({name: alone(*part, parsed) for name, part in parts(setting).items()}))
    elif parsed.row:
        parsed.output.write_text(json.dumps(training(setting, parsed.backend if parsed.row == "compiled" else False)))
    else:
        results = in_processes(sys.argv[1:] if argv is None else argv)
        show(results)
        write(parsed.output, results, asdict(setting))


def in_processes(argv: list[str]) -> dict[str, dict[str, Any]]:
    """All rows, each of which a process measures."""

    def row(name: str, cache: str) -> Any:
        output = Path(folder, "row.json")
        command = [sys.executable, __file__, *argv, "--row", name, "--output", str(output)]
        subprocess.run(command, check=True, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}"})
        return json.loads(output.read_text())

    with tempfile.TemporaryDirectory() as folder:
        training = {"eager": row("eager", "none")}
        training |= {f"compiled, {kind} cache": row("compiled", "training") for kind in ("empty", "filled")}
        cold, warm = row("parts", "parts"), row("parts", "parts")
    return {"training": training, "parts": {name: cold[name] | {"filled_cache_s": warm[name]["first_s"]} for name in cold}}


def training(setting: Setting, compile_with: str | bool) -> dict[str, Any]:
    """Seconds of the start, and of a later step: as such and as a multiple of the plain loop's."""
    costs = fit(setting, {"compile": compile_with})
    step_s = median(cost.wall_s for cost in costs.ours) / setting.steps
    ratio = against_neighbours([c.wall_s for c in costs.ours], [c.wall_s for c in costs.alone])
    return {"start_s": costs.warmup_s - setting.warmup * step_s, "step_s": step_s, "ratio": spread(ratio)}


def parts(setting: Setting) -> dict[str, Part]:
    """What is compiled alone, of the size of a microbatch."""
    torch.manual_seed(0)
    llama, rows = setting.llama, (setting.micro_batch, setting.sequence)
    hidden = torch.randn(*rows, llama.hidden_size, requires_grad=True)
    logits = torch.randn(*rows, llama.vocab_size, requires_grad=True)
    labels = torch.randint(0, llama.vocab_size, rows)
    block = Block(llama, RotaryTables(llama))
    block(hidden)  # makes the rotary tables, as the strategy's first forward does
    return {
        "first graph": (lambda x: x + 1, (torch.ones(1, requires_grad=True),)),
        "norm": (nn.RMSNorm(llama.hidden_size, llama.rms_norm_eps), (hidden,)),
        "loss": (lambda logits, labels: token_losses(logits, labels)[0], (logits, labels)),
        "block": (block, (hidden,)),
    }


def alone(part: Callable[..., Any], given: tuple[Tensor, ...], parsed: Any) -> dict[str, Any]:
    """Seconds of the first time, and of a later time as such and as a multiple of the same part eager, in turns."""
    compiled = torch.compile(part, backend=parsed.backend)

    def times(function: Callable[..., Any], calls: int = 1) -> float:
        start = now()
        for _ in range(calls):
            function(*given).sum().backward()
        return since(start).wall_s / calls

    times(part)
    first_s = times(compiled)
    calls = math.ceil(CALLS_S / times(part))
    times(compiled)
    eager, later = [times(part, calls)], list[float]()
    for _ in range(parsed.repeats):
        later.append(times(compiled, calls))
        eager.append(times(part, calls))
    return {"first_s": first_s, "eager_s": median(eager), "compiled_s": median(later), "ratio": spread(against_neighbours(later, eager))}


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table("blocks", "start, s", "a later step, ms", "of the plain loop's", title="training on one process: medians (and quartiles)")
    for name, each in results["training"].items():
        table.add_row(name, f"{each['start_s']:.1f}", f"{1e3 * each['step_s']:.0f}", shown(each["ratio"], 3))
    Console(width=100).print(table)
    table = Table("part alone", title="forward and backward of a microbatch")
    for column in ("first time, empty cache, s", "filled cache, s", "eager, ms", "compiled, ms", "of eager"):
        table.add_column(column, justify="right")
    for name, each in results["parts"].items():
        firsts = f"{each['first_s']:.1f}", f"{each['filled_cache_s']:.1f}"
        table.add_row(name, *firsts, f"{1e3 * each['eager_s']:.2f}", f"{1e3 * each['compiled_s']:.2f}", shown(each["ratio"], 2))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
