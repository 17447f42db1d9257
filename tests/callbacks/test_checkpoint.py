"""Checkpoint under a plain Trainer; under ThreeDStrategy it is tested in tests/checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_3d import Checkpoint, latest_checkpoint
from lightning_3d.errors import ConfigError


def test_saves_at_the_interval_and_at_the_end(fit: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path / "c"), 3)
    trainer, _ = fit(checkpoint, batches=8, enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path / "c")) == ["step-3", "step-6", "step-8"]
    assert checkpoint.last_model_path == checkpoint.best_model_path == str(tmp_path / "c" / "step-8")
    assert trainer.checkpoint_callbacks == [checkpoint]  # Lightning adds none of its own


class CountSaves(Callback):
    steps: list[int]

    def on_fit_start(self, *args: Any) -> None:
        self.steps = []

    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append(trainer.global_step)


def test_saves_no_step_twice(fit: Any, tmp_path: Path) -> None:
    """At the end only what the interval has not saved; a run that was finished has nothing to save."""
    count = CountSaves()
    fit(Checkpoint(str(tmp_path), 4), count, batches=8, enable_checkpointing=True)
    assert count.steps == [4, 8]
    fit(Checkpoint(str(tmp_path), 4), count, batches=8, enable_checkpointing=True, ckpt_path=tmp_path / "step-8")
    assert count.steps == []


def test_goes_on_where_it_stopped(fit: Any, tmp_path: Path) -> None:
    _, straight = fit(batches=8)
    fit(Checkpoint(str(tmp_path), 5, keep_last=2), batches=8, max_steps=5, enable_checkpointing=True)
    _, rest = fit(Checkpoint(str(tmp_path), 1, keep_last=2), batches=8, enable_checkpointing=True, ckpt_path=latest_checkpoint(tmp_path))
    assert rest.steps[-1]["lm_loss"] == straight.steps[-1]["lm_loss"]
    assert sorted(os.listdir(tmp_path)) == ["step-7", "step-8"]


def test_an_accumulation_is_one_step(fit: Any, tmp_path: Path) -> None:
    fit(Checkpoint(str(tmp_path), 2), batches=8, accumulate_grad_batches=2, enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-4"]


def test_a_trial_run_leaves_nothing(fit: Any, tmp_path: Path) -> None:
    fit(Checkpoint(str(tmp_path / "c"), 1), fast_dev_run=True, enable_checkpointing=True)
    assert not (tmp_path / "c").exists()
    fit(Checkpoint(str(tmp_path / "d"), 4), enable_checkpointing=True)
    fit(Checkpoint(str(tmp_path / "d"), 1), fast_dev_run=True, enable_checkpointing=True)  # and may be tried where a run has been
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["step-4"]


def test_a_folder_belongs_to_one_run(fit: Any, tmp_path: Path) -> None:
    fit(Checkpoint(str(tmp_path), 2), enable_checkpointing=True)
    with pytest.raises(ConfigError, match=r"holds step-4, but this run begins at step 0: resume with ckpt_path=last, or choose another"):
        fit(Checkpoint(str(tmp_path), 2), enable_checkpointing=True)
    fit(Checkpoint(str(tmp_path), 2), enable_checkpointing=True, ckpt_path=tmp_path / "step-4")


@pytest.mark.parametrize(("key", "value"), [("checkpoint_interval", 0), ("keep_last", 0), ("keep_last", -1)])
def test_numbers_are_at_least_1(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        Checkpoint(**{"checkpoints_path": "c", "checkpoint_interval": 1} | {key: value})


def test_folders_of_other_strategies_are_not_known(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path), 1)
    trainer = Trainer(accelerator="cpu", strategy=ModelParallelStrategy(), logger=False, callbacks=[checkpoint])
    with pytest.raises(ConfigError, match="ModelParallelStrategy: use Lightning's ModelCheckpoint"):
        checkpoint.setup(trainer, BoringModel(), "fit")
