"""Checkpoints by steps.

Under ThreeDStrategy a checkpoint is a folder of the ranks' shards that any layout can load (lightning_3d/checkpoint); under a plain Trainer
it is Lightning's own file. Either is called `step-100`, and `latest_checkpoint(checkpoints_path)` finds the newest.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.checkpoint import clear_leftovers, remove, step_folder, whole_steps
from lightning_3d.errors import ConfigError
from lightning_3d.strategy import ThreeDStrategy


class Checkpoint(pl_callbacks.Checkpoint):
    """Saves every `checkpoint_interval` optimizer steps, at the end of the run and on SIGTERM; a run that is resumed goes on from there.

    Args:
        checkpoints_path: folder of the checkpoints, of one run only.
        checkpoint_interval: optimizer steps between two checkpoints.
        keep_last: how many checkpoints to keep; null keeps all.

    Raises:
        ConfigError: an interval or a number below 1; a folder with checkpoints beyond the step that the run begins at.
    """

    def __init__(self, checkpoints_path: str, checkpoint_interval: int, keep_last: int | None = None) -> None:
        for key, value in (("checkpoint_interval", checkpoint_interval), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value} must be at least 1")
        self.checkpoints_path, self.checkpoint_interval, self.keep_last = checkpoints_path, checkpoint_interval, keep_last
        self.last_model_path = ""
        self._saved_step = 0  # or the step that the run began at

    @property
    def best_model_path(self) -> str:
        """The newest: what `trainer.test(ckpt_path="best")` takes where no metric is monitored."""
        return self.last_model_path

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy) and not isinstance(strategy, ThreeDStrategy):
            raise ConfigError(f"Checkpoint does not know the folders of {type(strategy).__name__}: use Lightning's ModelCheckpoint with it")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step
        beyond = trainer.strategy.broadcast(whole_steps(self.checkpoints_path)[-1:])  # the view of rank 0
        if beyond and beyond[0] > trainer.global_step:
            raise ConfigError(
                f"checkpoints_path={self.checkpoints_path} holds step-{beyond[0]}, but this run begins at step {trainer.global_step}: "
                "resume with ckpt_path=last, or choose another folder"
            )
        if trainer.is_global_zero:
            clear_leftovers(self.checkpoints_path)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if trainer.global_step // self.checkpoint_interval > self._saved_step // self.checkpoint_interval:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # raised between two steps, by all ranks
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._saved_step or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        path = str(step_folder(self.checkpoints_path, trainer.global_step))
        trainer.save_checkpoint(path)
        self.last_model_path, self._saved_step = path, trainer.global_step
        if self.keep_last and trainer.is_global_zero:  # the new one is whole: every rank has written its part
            for step in whole_steps(self.checkpoints_path)[: -self.keep_last]:
                remove(step_folder(self.checkpoints_path, step))
