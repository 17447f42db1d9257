"""Resuming in the same layout is bitwise the run that was never interrupted: mid-epoch, in an accumulation, after SIGTERM, at the end."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks_resume import GLOBAL_BATCH, SAVED, STEPS, Layout, Run, fit

from lightning_3d.checkpoint import step_folder, whole_steps
from lightning_3d.testing import RankPool

Seen = list[dict[str, Any]]
VALIDATED = {"limit_val_batches": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
TWO_RANKS = {
    "dp": Run(Layout(dp=2, mode="fsdp"), "", trainer=VALIDATED),
    "pp-accumulate": Run(Layout(pp=2), "", accumulate=2),
    "tp-epochs": Run(Layout(tp=2), "", trainer={"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3}),
}
EPOCHS = 9
ALIKE = ("losses", "rates", "batches")


@pytest.fixture(scope="module")
def straight(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that nothing interrupts, and their folders; each run once."""
    seen: dict[str, tuple[Path, Seen]] = {}

    def run(name: str) -> tuple[Path, Seen]:
        if name not in seen:
            folder = tmp_path_factory.mktemp(name)
            seen[name] = folder, pool.run(fit, 2, (replace(TWO_RANKS[name], folder=str(folder)),))
        return seen[name]

    return run


def resume(pool: RankPool, name: str, path: str | Path, folder: Path, **changes: Any) -> Seen:
    return pool.run(fit, 2, (replace(TWO_RANKS[name], folder=str(folder), resume=str(path), **changes),))


def assert_bitwise(after: Seen, before: Seen, steps: int, batches_a_step: int = 1, keys: tuple[str, ...] = ALIKE) -> None:
    for mine, theirs in zip(after, before, strict=True):
        for key in keys:
            assert mine[key] == theirs[key][steps * batches_a_step :], key
        assert (mine["step"], mine["consumed"]) == (theirs["step"], theirs["consumed"])
        assert [key for key, value in mine["final"].items() if not torch.equal(value, theirs["final"][key])] == []


@pytest.mark.parametrize("name", TWO_RANKS)
def test_resume_is_bitwise_the_run_that_went_on(name: str, straight: Any, pool: RankPool, tmp_path: Path) -> None:
    """The epochs are of 3 steps, so step 5 is inside the second."""
    folder, before = straight(name)
    run = TWO_RANKS[name]
    end = EPOCHS if "epochs" in name else STEPS
    assert whole_steps(folder) == [SAVED, end]
    assert before[0]["consumed"] == end * GLOBAL_BATCH
    assert len(set(before[0]["rates"])) > 4  # else the schedule is not under test
    after = resume(pool, name, step_folder(folder, SAVED), tmp_path)
    assert_bitwise(after, before, SAVED, run.accumulate)
    assert after[0]["consumed_at_start"] == SAVED * GLOBAL_BATCH


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_finished_run_again_is_a_no_op(name: str, straight: Any, pool: RankPool) -> None:
    folder, before = straight(name)
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    after = resume(pool, name, step_folder(folder, before[0]["step"]), folder)
    assert [rank["losses"] for rank in after] == [[], []]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written


def test_a_finished_run_can_be_prolonged(straight: Any, pool: RankPool, tmp_path: Path) -> None:
    """Its last checkpoint was saved at the end, not at an interval. Its epoch was at an end, too, so batches are numbered anew."""
    short = replace(TWO_RANKS["dp"], folder=str(tmp_path), trainer=VALIDATED | {"max_steps": 3})
    assert pool.run(fit, 2, (short,))[0]["last"] == str(step_folder(tmp_path, 3))
    assert_bitwise(resume(pool, "dp", step_folder(tmp_path, 3), tmp_path), straight("dp")[1], 3, keys=ALIKE[:2])


class Terminate(pl.Callback):
    """The rank is told to stop while it is about to train on a batch."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


class Told:
    """Makes Terminate on each rank."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def __call__(self) -> Terminate:
        return Terminate(self.rank, self.batch)


@pytest.mark.parametrize(("name", "rank", "batch", "step"), [("dp", 0, 3, 3), ("pp-accumulate", 1, 5, 3), ("dp", 1, 7, 7)])
def test_sigterm_to_one_rank_stops_all_between_two_steps(
    name: str, rank: int, batch: int, step: int, straight: Any, pool: RankPool, tmp_path: Path
) -> None:
    """Told in the middle of the third accumulation, they finish it. What is resumed can be saved and resumed again."""
    _, before = straight(name)
    stopped = pool.run(fit, 2, (replace(TWO_RANKS[name], folder=str(tmp_path), callbacks=(Told(rank, batch),)),))
    assert [(seen["stopped"], seen["step"], seen["last"]) for seen in stopped] == [(143, step, str(step_folder(tmp_path, step)))] * 2
    assert whole_steps(tmp_path)[-1] == step
    assert_bitwise(resume(pool, name, step_folder(tmp_path, step), tmp_path), before, step, TWO_RANKS[name].accumulate)
    if step < SAVED:
        again = resume(pool, name, step_folder(tmp_path, SAVED), tmp_path / "again")
        assert_bitwise(again, before, SAVED, TWO_RANKS[name].accumulate)


def test_a_new_run_does_not_mix_with_an_old_one(straight: Any, pool: RankPool) -> None:
    folder, _ = straight("dp")
    for seen in pool.run(fit, 2, (replace(TWO_RANKS["dp"], folder=str(folder)),)):
        assert f"checkpoints_path={folder} holds step-8, but this run begins at step 0" in seen["error"]
        assert seen["losses"] == []


def test_leftovers_of_a_killed_save_do_not_disturb(straight: Any, pool: RankPool, tmp_path: Path) -> None:
    """A folder that is no whole checkpoint is neither taken for one nor removed."""
    for name in (".step-5.unfinished", ".step-2.removed", "step-100", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__7_0.distcp").write_bytes(b"half a shard")
    (tmp_path / "step-4" / ".metadata").touch()
    seen = pool.run(fit, 2, (replace(TWO_RANKS["dp"], folder=str(tmp_path), checkpoint={"checkpoint_interval": 2, "keep_last": 2}),))
    assert_bitwise(seen, straight("dp")[1], 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-6", "step-8"]
    files = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "trainer.pt"]
    assert sorted(path.name for path in (tmp_path / "step-8").iterdir()) == files
