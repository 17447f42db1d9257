"""Steps, epochs and accumulation: what the data module counts must be what the Trainer does."""

from pathlib import Path
from typing import Any

import pytest

from lightning_3d.data.stages import DataStage
from lightning_3d.errors import ConfigError
from tests.test_datamodule import expected, fit, folders

__all__ = ["folders"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_overfit_batches_resumed(folders: tuple[str, str], tmp_path: Path) -> None:
    """Within the second pass over the four batches."""
    settings: dict[str, Any] = {"overfit_batches": 4, "max_epochs": -1, "max_steps": 10}
    straight, _ = fit(folders, tmp_path / "straight", **settings)
    assert straight.seen == (expected(0, 16, 4) * 3)[:10]
    resumed, _ = fit(folders, tmp_path, ckpt_path=tmp_path / "straight/5.ckpt", **settings)
    assert resumed.seen == straight.seen[5:]


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3}, 9),
        ({"max_steps": 5, "max_epochs": 3}, 5),
        ({"max_steps": 30, "max_epochs": -1, "overfit_batches": 2}, 30),
    ],
)
def test_max_epochs_counts_what_is_read(folders: tuple[str, str], tmp_path: Path, settings: dict[str, Any], batches: int) -> None:
    """All of these read less than the 53 samples once."""
    module, _ = fit(folders, tmp_path, data={"max_epochs": 1.0}, **settings)
    assert len(module.seen) == batches
    with pytest.raises(ConfigError, match=r"data\.max_epochs=0\.1: this run would read .* times"):
        fit(folders, tmp_path, data={"max_epochs": 0.1}, **settings)


@pytest.mark.parametrize(("before", "after", "step"), [(4, 1, 5), (1, 5, 5), (2, 4, 10)])
def test_another_accumulation(folders: tuple[str, str], tmp_path: Path, before: int, after: int, step: int) -> None:
    """It goes on at the sample and with whole steps, where what was done is a multiple of it."""
    _, trainer = fit(folders, tmp_path / "begun", accumulate_grad_batches=before)
    done = 4 * before * step
    path = tmp_path / f"begun/{step}.ckpt"
    resumed, trainer = fit(folders, tmp_path, accumulate_grad_batches=after, max_steps=step + 3, ckpt_path=path)
    assert resumed.seen == expected(done, done + 3 * after * 4, 4)
    assert trainer.global_step == step + 3


def test_another_accumulation_amid_a_step(folders: tuple[str, str], tmp_path: Path) -> None:
    fit(folders, tmp_path)
    message = (
        r"trainer\.accumulate_grad_batches=4: the checkpoint was trained with 1, and its 5 batches are no multiple: resume with the same"
    )
    with pytest.raises(ConfigError, match=message):
        fit(folders, tmp_path, accumulate_grad_batches=4, ckpt_path=tmp_path / "5.ckpt")


def test_stages_where_steps_are_of_unequal_size(folders: tuple[str, str], tmp_path: Path) -> None:
    """13 batches an epoch in steps of 4 are 4 steps, so that step 6 begins with batch 17, not with batch 20."""
    keys = {"data_stages": [DataStage(6, folders[1])]}
    settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 4}
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=4 does not divide the 13 batches of an epoch, .* by max_steps alone"):
        fit(folders, tmp_path, data=keys, **settings)
    module, _ = fit(folders, tmp_path, data=keys, **settings, limit_train_batches=12)
    assert module.seen[:20] == expected(0, 80, 4)
    assert module.seen[20] != expected(80, 84, 4)[0]


def test_accumulation_of_nothing(folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.accumulate_grad_batches=0 must be at least 1$"):
        fit(folders, tmp_path, accumulate_grad_batches=0)
