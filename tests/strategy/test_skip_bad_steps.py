"""A step that is bad on one rank is skipped on all."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks_resume import Layout, Overflow, Run, fit

from lightning_3d.callbacks import SkipBadSteps
from lightning_3d.testing import RankPool


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, mode="fsdp"), Layout(pp=2), Layout(tp=2)], ids=str)
def test_all_ranks_skip_what_one_finds_bad(layout: Layout, pool: RankPool, tmp_path: Path) -> None:
    """The fifth step's loss is infinite on rank 1: weights and moments are those after the fourth."""
    run = Run(layout, str(tmp_path / "a"), module_type=Overflow, callbacks=(partial(SkipBadSteps),), trainer={"log_every_n_steps": 1})
    before = pool.run(fit, 2, (replace(run, trainer={"max_steps": 4}),))
    after = pool.run(fit, 2, (replace(run, folder=str(tmp_path / "b"), trainer={"max_steps": 5}),))
    for four, five in zip(before, after, strict=True):
        assert (four["step"], five["step"]) == (4, 5)
        assert [name for name, value in five["final"].items() if not torch.equal(value, four["final"][name])] == []
        assert all(value.isfinite().all() for value in five["final"].values())
