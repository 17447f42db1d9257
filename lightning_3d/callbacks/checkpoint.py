"""Checkpoints by steps and by the clock.

Under ThreeDStrategy a checkpoint is a folder of the ranks' shards that any layout can load (lightning_3d/checkpoint); under a plain Trainer
it is Lightning's own file. Either is called `step-100`, and `latest_checkpoint(checkpoints_path)` finds the newest.

A save that fails (a full disk) is an error in the log, and training goes on with the older checkpoints as they were; only when the last
save of a run fails does the run fail.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.checkpoint import at, clear_leftovers, remove, step_folder, whole_steps
from lightning_3d.errors import CheckpointWriteError, ConfigError
from lightning_3d.strategy import ThreeDStrategy

log = logging.getLogger(__name__)

LOCK_FILE = ".writer"


class Checkpoint(pl_callbacks.Checkpoint):
    """Saves every `checkpoint_interval` optimizer steps, at the end of the run, when it is told to stop, and when all ranks fail alike.

    Args:
        checkpoints_path: folder of the checkpoints, of one run only; or a URL, `s3://bucket/run`.
        checkpoint_interval: optimizer steps between two checkpoints.
        interval_minutes: save when so many have passed since the last one, too.
        keep_last: how many of the newest checkpoints to keep; null keeps all.
        keep_every: keep those of every n-th step, besides.
        save_initial_state: save before the first step.

    Raises:
        ConfigError: an interval or a number below 1; a folder that another run is writing to, or with checkpoints beyond the step that
            the run begins at.
        CheckpointWriteError: the last checkpoint of the run could not be written.
    """

    def __init__(
        self,
        checkpoints_path: str,
        checkpoint_interval: int,
        interval_minutes: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        save_initial_state: bool = False,
    ) -> None:
        for key, value in (("checkpoint_interval", checkpoint_interval), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value} must be at least 1")
        if interval_minutes is not None and interval_minutes <= 0:
            raise ConfigError(f"interval_minutes={interval_minutes} must be above 0")
        if keep_every is not None and keep_last is None:
            raise ConfigError(f"keep_every={keep_every} says what to keep besides keep_last: set keep_last too")
        self.checkpoints_path, self.checkpoint_interval, self.interval_minutes = checkpoints_path, checkpoint_interval, interval_minutes
        self.keep_last, self.keep_every, self.save_initial_state = keep_last, keep_every, save_initial_state
        self.last_model_path = ""
        self._saved_step = 0  # or the step that the run began at
        self._saved_s = 0.0
        self._is_training = False  # and the folder is this run's
        self._lock: TextIO | None = None

    @property
    def best_model_path(self) -> str:
        """The newest: what `trainer.test(ckpt_path="best")` takes where no metric is monitored."""
        return self.last_model_path

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy) and not isinstance(strategy, ThreeDStrategy):
            raise ConfigError(f"Checkpoint does not know the folders of {type(strategy).__name__}: use Lightning's ModelCheckpoint with it")
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            self._on_rank_0(trainer, self._take_folder)  # before one is loaded: another run might remove it meanwhile

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step, self._saved_s = trainer.global_step, time.monotonic()
        self._on_rank_0(trainer, lambda: self._check_steps(trainer))
        self._is_training = True
        if self.save_initial_state and not trainer.global_step:
            self._saved_step = -1
            self._save(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if isinstance(trainer.strategy, ThreeDStrategy):
            self._or_log(trainer, trainer.strategy.saver.poll)
            self._note(trainer.strategy.saver.newest)
        if self._is_due(trainer):
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, is_last=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            if self._is_training and _between_steps(trainer):  # and the strategy saves only if all ranks are here
                self._save(trainer)
        finally:
            self._release()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()  # not called after an exception

    def _on_rank_0(self, trainer: Trainer, find_problem: Callable[[], str | None]) -> None:
        """Raise on all ranks what rank 0 finds wrong with the folder."""
        problem = None
        if trainer.is_global_zero:
            try:
                problem = find_problem()
            except (OSError, ConfigError) as error:
                problem = f"cannot be used ({error}): choose another folder"
        if problem := trainer.strategy.broadcast(problem):
            raise ConfigError(f"checkpoints_path={self.checkpoints_path} {problem}")

    def _take_folder(self) -> str | None:
        """Why this run cannot write to its folder; else it is this run's until it ends."""
        folder = at(self.checkpoints_path)
        if isinstance(folder, Path):  # nobody locks an object store
            folder.mkdir(parents=True, exist_ok=True)
            self._lock, other = lock(folder / LOCK_FILE)
            if self._lock is None:
                return f"is being written to by another run ({other}): wait for its end, or choose another folder"
        clear_leftovers(folder)
        return None

    def _check_steps(self, trainer: Trainer) -> str | None:
        """Why this run cannot save after the step that it begins at."""
        last, first = max(whole_steps(self.checkpoints_path), default=0), trainer.global_step
        if trainer.fast_dev_run or last <= first:  # type: ignore[attr-defined]  # set by a connector
            return None
        return f"holds step-{last}, but this run begins at step {first}: resume with ckpt_path=last, or choose another folder"

    def _release(self) -> None:
        self._is_training = False
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)  # with its folder, by someone else
            self._lock.close()
            self._lock = None

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.global_step // self.checkpoint_interval > max(0, self._saved_step) // self.checkpoint_interval:
            return True
        if self.interval_minutes is None or trainer.global_step == self._saved_step or not _between_steps(trainer):
            return False
        passed = time.monotonic() - self._saved_s > 60 * self.interval_minutes
        return trainer.strategy.reduce_boolean_decision(passed and trainer.is_global_zero, all=False)  # by the clock of rank 0

    def _save(self, trainer: Trainer, *, is_last: bool = False) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        if trainer.global_step != self._saved_step:
            path = str(step_folder(self.checkpoints_path, trainer.global_step))
            self._saved_step, self._saved_s = trainer.global_step, time.monotonic()
            self._or_log(trainer, lambda: trainer.save_checkpoint(path), is_last=is_last)
            if not isinstance(trainer.strategy, ThreeDStrategy):
                self._note(path)
        if isinstance(trainer.strategy, ThreeDStrategy):
            if is_last:
                self._or_log(trainer, trainer.strategy.saver.wait, is_last=True)
            self._note(trainer.strategy.saver.newest)
        if self.keep_last and trainer.is_global_zero:
            self._remove_old_ones(self.keep_last)

    def _note(self, path: str) -> None:
        """What the strategy has written; it may be another callback's, or not this save's, where a rank was lost or the save failed."""
        if path and at(path).parent == at(self.checkpoints_path):
            self.last_model_path = path

    def _remove_old_ones(self, keep_last: int) -> None:
        """Of those that are whole; one that is still being written is counted the next time."""
        for step in whole_steps(self.checkpoints_path)[:-keep_last]:
            if not self.keep_every or step % self.keep_every:
                try:
                    remove(step_folder(self.checkpoints_path, step))
                except OSError as error:  # on rank 0 alone, which must not end for it
                    log.warning("checkpoint step-%d could not be removed: %s", step, error)

    @staticmethod
    def _or_log(trainer: Trainer, action: Callable[[], None], *, is_last: bool = False) -> None:
        """A save that failed is no reason to stop, unless it was the last."""
        try:
            action()
        except CheckpointWriteError as error:
            if is_last:
                raise
            if trainer.is_global_zero:
                log.error("%s; training goes on", error)


def lock(path: Path) -> tuple[TextIO | None, str]:
    """A file that no other process can lock, until it is closed or this process ends, however it does; or None, and who has locked it."""
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would go on in the DataLoader's workers when the rank is killed
    except (BlockingIOError, PermissionError):  # POSIX leaves the choice
        file.seek(0)
        return None, file.read().strip()
    if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:  # its owner has just removed it
        return lock(path)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file, ""


def _between_steps(trainer: Trainer) -> bool:
    """Whether no optimizer step is half done, and no accumulation, whose gradients are in no checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    step = loop.automatic_optimization.optim_progress.optimizer.step.current
    batches: int = loop.batch_progress.current.processed  # type: ignore[attr-defined]  # declared as its base
    return step.ready == step.completed and batches % trainer.accumulate_grad_batches == 0
