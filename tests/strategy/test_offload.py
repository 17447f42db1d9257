"""Offloading to the CPU changes where tensors lie, and no number; without a GPU one is made up to see the places."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_fit import Case
from ranks_offload import offloaded
from ranks_refusals import Lengths, llama
from ranks_resume import SAVED, Layout, Run, fit
from test_bad_input import trainer

from lightning_3d.checkpoint import step_folder
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import backend_for
from lightning_3d.testing import RankPool


def test_the_same_numbers_also_after_a_resume_without(pool: RankPool, tmp_path: Path) -> None:
    with_, without = (Run(Layout(dp=2, mode="fsdp", cpu_offload=offload), str(tmp_path / str(offload))) for offload in (True, False))
    plain, seen = pool.run(fit, 2, (without,)), pool.run(fit, 2, (with_,))
    resumed = pool.run(fit, 2, (replace(without, folder=str(tmp_path / "resumed"), resume=str(step_folder(tmp_path / "True", SAVED))),))
    for mine, after, theirs in zip(seen, resumed, plain, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert after["losses"] == theirs["losses"][SAVED:]
        for final in (mine["final"], after["final"]):
            assert [name for name, value in final.items() if not torch.equal(value, theirs["final"][name])] == []


def test_every_unit_offloads(pool: RankPool) -> None:
    for seen in pool.run(
        offloaded, 2, (Case((2, 1, 1), strategy={"data_parallel": "fsdp", "cpu_offload": True}, trainer={"max_steps": 1}),)
    ):
        assert seen == (5, 5)  # four blocks and the stage


@pytest.mark.parametrize("strategy", [{}, {"data_parallel": "fsdp"}, {"data_parallel": "fsdp", "pp": 2}, {"dp": 2}], ids=str)
def test_what_has_no_shards_to_offload(strategy: dict) -> None:
    refusing = trainer(strategy.get("dp", 1) * strategy.get("pp", 1), cpu_offload=True, **strategy)
    with pytest.raises(ConfigError, match=r"^cpu_offload=True with data_parallel=\w+, dp=\d, cp=1: it offloads shards over dp x cp; set"):
        refusing.fit(llama(), datamodule=Lengths(16))


def test_backends_of_a_device_and_of_the_cpu() -> None:
    assert backend_for("nccl", "cuda", on_cpu_too=True) == "cpu:gloo,cuda:nccl"
    assert backend_for("nccl", "cuda", on_cpu_too=False) == "nccl"
    assert backend_for("gloo", "cpu", on_cpu_too=True) == "gloo"
    assert backend_for("cuda:nccl,cpu:gloo", "cuda", on_cpu_too=True) == "cuda:nccl,cpu:gloo"


def on_two_devices(*, gloo: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
    asked = {"dims": {"dp": 2, "tp": 2, "pp": 2}, "rank": 7, "gloo": gloo, "options": {"sequence_parallel": True} | options}
    command = [sys.executable, str(Path(__file__).with_name("one_rank_of_two_devices.py")), json.dumps(asked)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_each_device_sends_its_own() -> None:
    """What the CPU holds is added up over tp and between tied stages over gloo; everything else over the device's own backend."""
    seen = json.loads(on_two_devices(data_parallel="fsdp", cpu_offload=True).stdout)
    assert [call for call in seen["collectives"] if call[2] == "cpu"] == [
        ["all-reduce", "tp", "cpu"],
        ["receive", "pp", "cpu"],
        ["send", "pp", "cpu"],
    ]
    assert seen["lie"] == {kept: ["cpu"] for kept in ("parameters", "gradients", "moments", "saved")} | {
        "buffers": ["gpu"],
        "numbers": ["gpu"],
    }


@pytest.mark.slow
def test_the_test_on_two_devices_sees_what_is_elsewhere() -> None:
    seen = json.loads(on_two_devices(data_parallel="zero2").stdout)
    assert {call[2] for call in seen["collectives"]} | {place for places in seen["lie"].values() for place in places} == {"gpu"}
    assert "No backend type associated with device type cpu" in on_two_devices(gloo=False, data_parallel="fsdp", cpu_offload=True).stderr
