"""Weights & Biases, offline: Nanotron's names, and the numbers that every rank sees."""

from pathlib import Path

import pytest
from ranks_wandb import run
from scenario import Scenario

from lightning_3d.testing import RankPool

NAMES = {"lm_loss", "z_loss", "grad_norm", "lr", "consumed_tokens", "tokens_per_sec", "tokens_per_sec_per_gpu", "global_batch_size"}


def test_offline_run(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(run, 2, (Scenario(pp=2), str(tmp_path)), timeout_s=240)
    told, seen = ranks[0]["told"], ranks[0]["seen"]
    assert told.keys() >= NAMES
    for name in ("lm_loss", "z_loss", "grad_norm"):
        assert told[name] == pytest.approx(seen[name], rel=1e-6)
        assert seen[name] == ranks[1]["seen"][name]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
