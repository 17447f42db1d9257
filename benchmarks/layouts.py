"""What splitting costs: CPU-seconds of all ranks per 1,000 tokens, against a plain one-process loop of the same model in the same run.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py

Where cores are fewer than ranks, CPU-seconds say what a layout computes and copies beyond the model's own work; tokens per second and peak
memory are printed beside. Between two segments of a layout rank 0 runs the plain loop while the others wait.
"""

from argparse import ArgumentParser
from typing import Any

from measure import Setting, against_neighbours, as_dict, fit, parse, spread, write
from rich.console import Console
from rich.table import Table

from lightning_3d.testing import RankPool

LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {  # sizes, and the target: ahead of the best peer measured on this work
    "dp=2": ({"dp": 2}, 1.10),
    "tp=2": ({"tp": 2}, 1.45),
    "pp=2": ({"pp": 2}, 1.00),
    "dp=2 x tp=2": ({"dp": 2, "tp": 2}, 1.65),
    "tp=2 x pp=2": ({"tp": 2, "pp": 2}, 1.65),
}


def measure(setting: Setting, layout: dict[str, Any]) -> tuple[list[float], list[float], list[float], list[float], int]:
    """On each rank: CPU and wall seconds of its segments, of the plain loop's (rank 0), and its peak memory in bytes."""
    turns = fit(setting, layout)
    ours, plain = turns.ours, turns.plain
    return [s.cpu_s for s in ours], [s.wall_s for s in ours], [s.cpu_s for s in plain], [s.wall_s for s in plain], turns.peak_nbytes


def figures(setting: Setting, layout: dict[str, Any], ranks: list[Any]) -> dict[str, Any]:
    """The figures of a layout from what its ranks measured."""
    replicas = layout.get("dp", 1)
    tokens = setting.step_tokens * setting.steps
    cpu = [sum(rank[0][i] for rank in ranks) / replicas for i in range(setting.segments)]  # per replica's tokens, as the plain loop's
    wall, plain_cpu, plain_wall = ranks[0][1], ranks[0][2], ranks[0][3]
    return {
        "cpu_ratio": spread(against_neighbours(cpu, plain_cpu)),
        "cpu_s_per_1000_tokens": spread([1000 * s / tokens for s in cpu]),
        "plain_cpu_s_per_1000_tokens": spread([1000 * s / tokens for s in plain_cpu]),
        "tokens_per_s": spread([replicas * tokens / s for s in wall]),
        "plain_tokens_per_s": spread([tokens / s for s in plain_wall]),
        "peak_nbytes_of_a_rank": max(rank[4] for rank in ranks),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parse(parser, argv, "benchmarks/results/layouts.json")
    table = Table("layout", "CPU ratio (quartiles)", "target", "CPU-s / 1,000 tokens", "plain", "tokens/s", "plain", "peak MiB a rank")
    results: dict[str, Any] = {}
    with RankPool() as pool:
        for name in options.layouts:
            layout, target = LAYOUTS[name]
            world_size = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
            found = figures(options.setting, layout, pool.run(measure, world_size, (options.setting, layout), timeout_s=3600))
            results[name] = found | {"target": target}
            ratio = found["cpu_ratio"]
            row = [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})", f"<= {target:.2f}"]
            row += [f"{found[key]['median']:.3f}" for key in ("cpu_s_per_1000_tokens", "plain_cpu_s_per_1000_tokens")]
            row += [f"{found[key]['median']:,.0f}" for key in ("tokens_per_s", "plain_tokens_per_s")]
            table.add_row(name, *row, f"{found['peak_nbytes_of_a_rank'] / 2**20:,.0f}")
    Console().print(table)
    write(options.output, results, setting=as_dict(options.setting))


if __name__ == "__main__":
    main()
