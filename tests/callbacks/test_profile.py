"""Where time goes: on one thread by what was done, on ranks by ``python -m lightning_3d profile``."""

import json
import subprocess
import sys
import time
from pathlib import Path
from time import perf_counter

import pytest
import torch
import yaml
from torch.nn import functional as F
from torch.profiler import profile

from lightning_3d.__main__ import main
from lightning_3d.callbacks.profile import KINDS, length, shares

RECIPE = {
    "model": {
        "llama": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "data": {
        "class_path": "lightning_3d.SyntheticDataModule",
        "init_args": {"vocab_size": 64, "sequence_length": 32, "batch_accumulation_per_replica": 2},
    },
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 1000,
        "strategy": {"class_path": "ThreeDStrategy", "init_args": {"pp": 2}},
        "callbacks": [{"class_path": "lightning_3d.Checkpoint", "init_args": {"checkpoints_path": "not_written"}}],
    },
}


def test_kinds_add_up_to_the_time_that_passed() -> None:
    x, q = torch.randn(400, 400), torch.randn(1, 4, 256, 32)
    with profile() as profiler:
        begin = perf_counter()
        for _ in range(5):
            x @ x
        F.scaled_dot_product_attention(q, q, q)
        x.exp().sum()
        time.sleep(0.2)
        wall_us = 1e6 * (perf_counter() - begin)
    times = shares(profiler.events(), wall_us)
    assert set(times) == set(KINDS)
    assert sum(times.values()) == pytest.approx(wall_us)
    assert times["idle"] > 0.19e6
    assert times["communication"] == 0
    operators = {event.key: event.cpu_time_total for event in profiler.key_averages()}
    assert times["matmul"] == pytest.approx(operators["aten::matmul"], rel=0.05)
    assert times["attention"] == pytest.approx(operators["aten::scaled_dot_product_attention"], rel=0.05)
    assert times["other"] >= 0.9 * operators["aten::exp"]


def test_what_overlaps_counts_once() -> None:
    assert length([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert length([]) == 0


@pytest.mark.timeout(200)
def test_the_command_on_two_stages(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "lightning_3d", "profile", "--config", "recipe.yaml", "--steps", "2", "--out", "seen"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    table = json.loads((tmp_path / "seen/profile.json").read_text())
    assert list(table) == ["stage 0", "stage 1"]
    for stage, times in table.items():
        assert set(times) == set(KINDS)
        assert min(times[kind] for kind in ("attention", "matmul", "communication", "other")) > 0
        assert f"  {stage}" in ended.stdout
    totals = [sum(times.values()) for times in table.values()]
    assert totals[0] == pytest.approx(totals[1], rel=0.3), "a step takes as long on every rank"
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"seen/rank-00{rank}.json").read_text())
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "seen"}, "nothing is written elsewhere"


def test_a_wrong_number_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--config", "recipe.yaml", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "error: --steps 0: give 1 or more\n"
