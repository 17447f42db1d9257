"""When Checkpoint saves, what it keeps, and whose folder it is."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

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


class At(Callback):
    """Does something before or after the batches of one step."""

    def __init__(self, step: int, action: Callable[[], Any], hook: str = "on_train_batch_start") -> None:
        setattr(self, hook, lambda trainer, *_: action() if trainer.global_step == step else None)


def fail() -> None:
    raise RuntimeError("out of coffee")


def test_the_clock_waits_for_the_end_of_an_accumulation(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of half an accumulation are in no checkpoint; steps are of 4 batches, and the clock would save after 7 and 11."""
    minutes = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: 60.0 * next(minutes))
    batches: list[int] = []
    see = Callback()
    see.on_save_checkpoint = lambda trainer, *_: batches.append(trainer.fit_loop.epoch_loop.batch_progress.current.processed)  # type: ignore[method-assign]
    fit(Checkpoint(str(tmp_path), 100, interval_minutes=1.5), see, batches=16, accumulate_grad_batches=4, enable_checkpointing=True)
    assert batches == [8, 16]


def test_an_exception_before_training_is_not_followed_by_a_save(fit: Any, tmp_path: Path) -> None:
    """The folder may be another run's."""
    fit(Checkpoint(str(tmp_path / "a"), 4), batches=4, enable_checkpointing=True)
    resumed: dict[str, Any] = {"ckpt_path": str(tmp_path / "a/step-4"), "max_epochs": 2, "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="out of coffee"):
        fit(At(4, fail, "on_train_start"), Checkpoint(str(tmp_path / "b"), 4), **resumed)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_folder_that_is_gone_hides_no_error(fit: Any, tmp_path: Path) -> None:
    def lose() -> None:
        shutil.rmtree(tmp_path / "a")
        fail()

    with pytest.raises(RuntimeError, match="out of coffee"):
        fit(At(0, lose), Checkpoint(str(tmp_path / "a"), 9), enable_checkpointing=True)


def test_an_old_one_that_cannot_be_removed(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def busy(path: Path) -> None:
        raise OSError(f"{path.name} is busy")

    monkeypatch.setattr(module, "remove", busy)
    fit(Checkpoint(str(tmp_path), 2, keep_last=1), enable_checkpointing=True)
    assert saved(tmp_path) == ["step-2", "step-4"]
    assert "step-2 could not be removed: step-2 is busy" in caplog.text


def test_a_folder_that_cannot_be(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^checkpoints_path=.*/file/a cannot be used \(.*Not a directory.*\): choose another folder$"):
        fit(Checkpoint(str(tmp_path / "file/a"), 2), enable_checkpointing=True)


def test_one_run_a_folder(fit: Any, tmp_path: Path) -> None:
    """Another process has it: refused by its name. When that has ended, however it did, the folder is free, whatever its workers do."""
    code = f"""if True:
        from lightning_3d.callbacks.checkpoint import *
        file = lock(Path({str(tmp_path / LOCK)!r}))
        if not os.fork():
            time.sleep(20)
            os._exit(0)
        print("have it", flush=True)
        input()"""
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


def test_a_lock_is_not_held_by_a_worker_that_its_owner_leaves_behind(tmp_path: Path) -> None:
    """The owner is killed; its child, made by a fork as a DataLoader makes them, lives until the pipe closes."""
    code = (
        f"from lightning_3d.callbacks.checkpoint import *; a = lock(Path({str(tmp_path / LOCK)!r})); child = os.fork()\n"
        "if child: print('have it', flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"have it\n"
        assert lock(tmp_path / LOCK)[0] is None
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert lock(tmp_path / LOCK)[0] is not None


def test_a_lock_that_its_owner_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening it and our getting it: a lock on a file that nobody else can find any more is none."""
    path, lockf = tmp_path / LOCK, fcntl.lockf
    path.touch()

    def removed_meanwhile(file: Any, operation: int) -> None:
        path.unlink()
        monkeypatch.undo()
        lockf(file, operation)

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    file, _ = lock(path)
    assert file is not None
    assert os.fstat(file.fileno()).st_ino == path.stat().st_ino


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
