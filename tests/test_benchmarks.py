"""Every benchmark runs at toy size and writes its figures; what the figures are is not tested here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOY = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv-heads": 2,
    "ffn": 48,
    "vocabulary": 64,
    "sequence": 16,
    "warmup": 1,
    "steps": 1,
    "segments": 2,
}
SIZES = [f"--{name}={value}" for name, value in TOY.items()]


def run(script: str, output: Path, *arguments: str) -> Any:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--output", str(output)]
    subprocess.run(command, check=True, timeout=240, cwd=output.parent)
    return json.loads(output.read_text())["results"]


@pytest.mark.timeout(260)
def test_single(tmp_path: Path) -> None:
    ratio = run("single.py", tmp_path / "single.json", *SIZES)["ratio"]
    assert 0 < ratio["tokens_per_s"]["low"] <= ratio["tokens_per_s"]["median"] <= ratio["tokens_per_s"]["high"]


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_layouts(tmp_path: Path) -> None:
    row = run("layouts.py", tmp_path / "layouts.json", *SIZES, "--layouts", "tp=2")["tp=2"]
    assert row["ratio"]["median"] > 2  # at this size a step is all overhead
    assert row["tokens_per_s"] > 0
    assert row["peak_mib"] > 0


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_context(tmp_path: Path) -> None:
    arguments = ("--sequences", "16", "--layouts", "cp=1", "cp=2 cp_method=ring")
    rows = run("context.py", tmp_path / "context.json", *SIZES, *arguments)["16"]
    assert rows.keys() == {"cp=1", "cp=2 cp_method=ring"}
    assert all(row["tokens_per_s"] > 0 and row["peak_mib"] > 0 for row in rows.values())


def test_the_ratio_counts_all_ranks_and_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from figures import Cost
    from layouts import summary
    from measure import Costs

    def costs(*cpu_s: float) -> list[Cost]:
        return [Cost(wall_s=2.0, cpu_s=each) for each in cpu_s]

    first = Costs(ours=costs(1.2, 1.4), alone=costs(1.0, 1.0, 3.0), at_once=costs(1.1, 1.1, 3.3), peak_nbytes=2**20)
    second = Costs(ours=costs(1.0, 3.0), at_once=costs(1.3, 1.3, 3.9), peak_nbytes=2**21)
    row = summary([first, second], tokens=500, dp=2)
    assert row["ratio"]["median"] == pytest.approx(1.1)  # (1.2 + 1.0) / 2 replicas / 1.0, and (1.4 + 3.0) / 2 / 2.0
    assert row["plain_at_once_ratio"]["median"] == pytest.approx(1.2)
    assert row["tokens_per_s"] == pytest.approx(500)
    assert row["plain_cpu_s_per_1000_tokens"] == pytest.approx(2.0)
    assert row["peak_mib"] == 2


@pytest.mark.timeout(260)
def test_schedules(tmp_path: Path) -> None:
    arguments = ("--layers=4", "--accumulation=4", "--engines", "1f1b", "zbv", "--ranks", "2", "8")
    results = run("schedules.py", tmp_path / "schedules.json", *SIZES, *arguments)
    for row in results["measured"].values():
        assert row["ratio"]["low"] > 0.9  # waiting and bookkeeping come on top of the ideal
        assert 0 < row["ideal_bubble"] < row["bubble"] < 1
    simulated = results["simulated"]
    assert simulated["zbv"]["8"] < simulated["1f1b"]["8"]
    assert simulated["1f1b"]["8"] == pytest.approx(7 / (32 + 7))  # whatever the times are: stages are equal


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_memory(tmp_path: Path) -> None:
    rows = run("memory.py", tmp_path / "memory.json", *SIZES, "--layers=4", "--settings", "1f1b", "--microbatches", "2", "4")
    assert rows["1f1b"]["4"]["held"] == rows["1f1b"]["2"]["held"] == [2, 1]
    assert min(rows["1f1b"]["4"]["peak_mib"]) > 0
    assert rows["1f1b"]["growth"] > 0


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_startup(tmp_path: Path) -> None:
    commands = run("startup.py", tmp_path / "startup.json", "--repeats", "1")["commands"]
    assert commands["--help"]["cpu_ratio"]["median"] < 1.3


@pytest.mark.timeout(260)
def test_prepare(tmp_path: Path) -> None:
    results = run("prepare.py", tmp_path / "prepare.json", "--nbytes=200000", "--repeats=2", f"--corpus={tmp_path / 'corpus'}")
    assert results["tokens"] > 20_000
    assert 0 < results["ratio"]["low"] <= results["ratio"]["median"] <= results["ratio"]["high"]


@pytest.mark.timeout(260)
def test_data(tmp_path: Path) -> None:
    results = run("data.py", tmp_path / "data.json", "--tokens", "200000", "--samples", "10000", "--repeats", "2")
    reads, order = results["reads"], results["order"]
    assert set(order) == {"first_batch_s", "array_s", "us_1", "us_8"}
    assert min(order.values()) > 0
    assert reads.keys() == {"16-bit tokens", "32-bit tokens"}
    for rows in reads.values():
        assert rows["bare slices"]["us"]["median"] > 0
        assert 0 < rows["windows"]["ratio"]["low"] <= rows["windows, positions"]["ratio"]["high"]


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_checkpoint(tmp_path: Path) -> None:
    arguments = ("--layouts", "dp=2", "--repeats", "2", "--folder", str(tmp_path))
    ratio = run("checkpoint.py", tmp_path / "checkpoint.json", *SIZES, *arguments)["dp=2"]["ratio"]
    assert 0 < ratio["save"]["low"] <= ratio["save"]["high"]
    assert 0 < ratio["load"]["low"] <= ratio["load"]["high"]
    assert ratio["stall"]["low"] > 0
    assert ratio["wait"]["low"] >= 0
    assert ratio["loss"].keys() == ratio["wait"].keys()
    assert ratio["disk"] > 1


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_compile(tmp_path: Path) -> None:
    results = run("compile.py", tmp_path / "compile.json", *SIZES, "--backend=eager", "--accumulation=2", "--repeats=2")
    assert list(results["training"]) == ["eager", "compiled, empty cache", "compiled, filled cache"]
    assert all(row["start_s"] > 0 for row in results["training"].values())
    assert list(results["parts"]) == ["first graph", "norm", "loss", "block"]
    assert all(min(row["first_s"], row["filled_cache_s"]) > row["compiled_s"] > 0 for row in results["parts"].values())
    for row in (*results["training"].values(), *results["parts"].values()):
        assert 0 < row["ratio"]["low"] <= row["ratio"]["high"]


@pytest.mark.timeout(260)
def test_gpu(tmp_path: Path) -> None:
    rows = run("gpu.py", tmp_path / "gpu.json", "--smoke", "--steps=2")["toy"]
    assert [name for name, row in rows.items() if "left_out" in row] == ["compiled, flash_attn"]
    assert all(row["ratio"] > 0 for row in rows.values() if "left_out" not in row)
