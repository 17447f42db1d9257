"""Python's garbage collection at fixed steps.

Left alone it runs when a rank has made so many objects, for tens of milliseconds, at another step on each rank; and all the others wait for
that one in the next collective. Here all ranks collect together, after the same steps, and what is there when training begins is not looked
at again.

Source: Liang et al. 2024 (TorchTitan), which does the same.
"""

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.errors import ConfigError


class GarbageCollection(Callback):
    """Collects after every ``gc_interval`` optimizer steps and not in between; afterwards all is as it was, also after an exception.

    Raises:
        ConfigError: an interval below 1.
    """

    def __init__(self, gc_interval: int = 100) -> None:
        if gc_interval < 1:
            raise ConfigError(f"gc_interval={gc_interval} must be at least 1 step")
        self.gc_interval = gc_interval
        self._was_enabled = False
        self._last_step: int | None = None  # None outside of training

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._was_enabled, self._last_step = gc.isenabled(), trainer.global_step
        gc.collect()
        gc.freeze()
        gc.disable()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._last_step and trainer.global_step % self.gc_interval == 0:
            gc.collect()
        self._last_step = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._last_step is None:
            return
        self._last_step = None
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
