"""What the strategy costs on one process: ``Trainer.fit`` with ThreeDStrategy against a plain PyTorch loop of the same model.

    OMP_NUM_THREADS=1 python benchmarks/single.py

Both take turns in one process, so that the machine's noise hits both; the figure is the median of the ratios of neighbours.
Target: at least 0.97 of the plain loop's tokens per second.
"""

from argparse import ArgumentParser

from measure import Setting, against_neighbours, as_dict, fit, parse, spread, write
from rich.console import Console
from rich.table import Table

from lightning_3d.testing import RankPool

TARGET = 0.97


def compare(setting: Setting) -> dict[str, dict[str, float]]:
    """Tokens per second of both, and their ratio."""
    turns = fit(setting, {})
    ours, plain = [s.wall_s for s in turns.ours], [s.wall_s for s in turns.plain]
    tokens = setting.step_tokens * setting.steps
    return {
        "strategy_tokens_per_s": spread([tokens / s for s in ours]),
        "plain_tokens_per_s": spread([tokens / s for s in plain]),
        "ratio": spread([1 / ratio for ratio in against_neighbours(ours, plain)]),
        "cpu_seconds_ratio": spread(against_neighbours([s.cpu_s for s in turns.ours], [s.cpu_s for s in turns.plain])),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse(ArgumentParser(description=__doc__.splitlines()[0]), argv, "benchmarks/results/single.json")
    with RankPool() as pool:
        (figures,) = pool.run(compare, 1, (options.setting,), timeout_s=3600)
    table = Table("figure", "low quartile", "median", "high quartile", "target")
    for name, figure in figures.items():
        table.add_row(name, *(f"{figure[key]:,.3f}" for key in ("low", "median", "high")), f">= {TARGET}" if name == "ratio" else "")
    Console().print(table)
    write(options.output, figures, target=TARGET, setting=as_dict(options.setting))


if __name__ == "__main__":
    main()
