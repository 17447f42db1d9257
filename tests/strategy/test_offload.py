"""Offloading to the CPU changes where tensors lie, and no number; on a machine without GPUs it is all the same place."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks_fit import Case
from ranks_offload import offloaded
from ranks_refusals import Lengths, llama
from ranks_resume import SAVED, Layout, Run, fit
from test_bad_input import trainer

from lightning_3d.checkpoint import step_folder
from lightning_3d.errors import ConfigError
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


@pytest.mark.parametrize("strategy", [{}, {"data_parallel": "fsdp"}, {"data_parallel": "fsdp", "dp": 2, "pp": 2}], ids=str)
def test_what_has_no_shards_to_offload(strategy: dict) -> None:
    refusing = trainer(strategy.get("dp", 1) * strategy.get("pp", 1), cpu_offload=True, **strategy)
    with pytest.raises(ConfigError, match=r"^cpu_offload=True with data_parallel=\w+, dp=\d, tp=1, pp=\d: it offloads shards over dp; set"):
        refusing.fit(llama(), datamodule=Lengths(16))
