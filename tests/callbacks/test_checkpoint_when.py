"""When Checkpoint saves, what it keeps, and whose folder it is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_3d import Checkpoint
from lightning_3d.callbacks import checkpoint as module
from lightning_3d.callbacks.checkpoint import lock
from lightning_3d.errors import ConfigError


def saved(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: int(name.removeprefix("step-")))


def test_by_the_clock(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes each time the clock is read: once when the run begins, at each save, and after each step."""
    minutes = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: 60.0 * next(minutes))
    fit(Checkpoint(str(tmp_path), 100, interval_minutes=2.5), batches=8, enable_checkpointing=True)
    assert saved(tmp_path) == ["step-3", "step-6", "step-8"]


def test_keeps_the_last_and_every_nth(fit: Any, tmp_path: Path) -> None:
    fit(Checkpoint(str(tmp_path), 1, keep_last=2, keep_every=3), batches=8, enable_checkpointing=True)
    assert saved(tmp_path) == ["step-3", "step-6", "step-7", "step-8"]


def test_the_initial_state(fit: Any, tmp_path: Path) -> None:
    fit(Checkpoint(str(tmp_path), 5, save_initial_state=True), batches=6, enable_checkpointing=True)
    assert saved(tmp_path) == ["step-0", "step-5", "step-6"]


def test_an_exception_between_two_steps_is_followed_by_a_save(fit: Any, tmp_path: Path) -> None:
    class Fails(module.pl_callbacks.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("out of coffee")

    with pytest.raises(RuntimeError, match="out of coffee"):
        fit(Fails(), Checkpoint(str(tmp_path), 100), batches=8, enable_checkpointing=True)
    assert saved(tmp_path) == ["step-3"]


def test_one_run_a_folder(fit: Any, tmp_path: Path) -> None:
    """Another process has it: refused by its name. When that has ended, however it did, the folder is free."""
    code = (
        f"from lightning_3d.callbacks.checkpoint import *; a = lock(Path({str(tmp_path / LOCK)!r})); print('have it', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"have it\n"
        with pytest.raises(
            ConfigError, match=rf"checkpoints_path=.* is being written to by another run \(process {other.pid} on .*\): wait"
        ):
            fit(Checkpoint(str(tmp_path), 2), batches=2, enable_checkpointing=True)
        other.kill()
    fit(Checkpoint(str(tmp_path), 2), batches=2, enable_checkpointing=True)
    assert saved(tmp_path) == ["step-2"]


LOCK = module.LOCK_FILE


def test_a_lock_that_its_owner_removes(tmp_path: Path) -> None:
    first, _ = lock(tmp_path / LOCK)
    assert first is not None
    assert lock(tmp_path / LOCK)[0] is None
    (tmp_path / LOCK).unlink()
    second, _ = lock(tmp_path / LOCK)
    assert second is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"interval_minutes": 0}, "interval_minutes=0 must be above 0"),
        ({"keep_every": 0}, "keep_every=0 must be at least 1"),
        ({"keep_every": 3}, "keep_every=3 says what to keep besides keep_last: set keep_last too"),
    ],
)
def test_bad_settings(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint("c", 1, **keys)
