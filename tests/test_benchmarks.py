"""Each benchmark runs at toy size, prints its table and writes its figures; how fast it is, is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOY = ["--hidden", "32", "--ffn", "64", "--vocabulary", "64", "--sequence", "16", "--warmup", "1", "--steps", "1", "--segments", "2"]
RUNS = {"single": TOY, "layouts": [*TOY, "--layouts", "dp=2", "pp=2"], "startup": ["--runs", "1"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_benchmark(name: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *RUNS[name], "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(output.read_text())
    ratios = {"single": ["ratio"], "layouts": ["dp=2", "cpu_ratio"], "startup": ["help_ratio"]}[name]
    figure = written["results"]
    for key in ratios:
        figure = figure[key]
    assert 0 < figure["low"] <= figure["median"] <= figure["high"]
    assert written["machine"]["cores"]
    assert "┃" in done.stdout


def test_every_benchmark_is_run() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == RUNS.keys() | {"measure"}
