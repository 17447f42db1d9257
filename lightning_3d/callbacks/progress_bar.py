"""A progress bar that counts optimizer steps, and prints lines where there is no terminal.

A bar redraws itself with carriage returns, which a log file keeps all of; so without a terminal each refresh is one line. It
refreshes when logs are due (`log_every_n_steps`), because showing a number waits for the device.
"""

import sys
from math import isfinite
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

ON_DEVICE = ("lm_loss", "grad_norm")  # logged without prog_bar=True, which has Lightning read them, and wait, after every step
FIRST = ("lm_loss", "val_lm_loss", "grad_norm", "tokens_per_sec", "lr")


class ProgressBar(TQDMProgressBar):
    """Shows lm_loss, grad_norm, tokens_per_sec, lr, and whatever else is logged with `prog_bar=True`, on one rank.

    Args:
        refresh_rate: optimizer steps between two refreshes; null means the Trainer's `log_every_n_steps`, 0 switches it off.
        plain: one line per refresh instead of a bar; null means: when standard output is no terminal.
    """

    reads_when_due = True  # what is in ON_DEVICE
    BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} {bar:12} {elapsed}<{remaining}{postfix}"

    def __init__(self, refresh_rate: int | None = None, plain: bool | None = None) -> None:
        super().__init__(refresh_rate=1 if refresh_rate is None else refresh_rate)
        self._follow_log = refresh_rate is None
        self.plain = not sys.stdout.isatty() if plain is None else plain
        self._shown_step = self._first_step = 0
        self._start_s = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._follow_log:
            self._refresh_rate = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    @property
    @override
    def is_disabled(self) -> bool:
        """Whether tqdm draws nothing: switched off, or lines are printed instead."""
        return self.plain or super().is_disabled

    @override
    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        self._first_step = self._shown_step = trainer.global_step
        self._start_s = perf_counter()

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        bar = self.train_progress_bar
        bar.total = total_steps(trainer)
        bar.set_description_str("step", refresh=False)
        if not bar.disable:
            bar.n = bar.initial = trainer.global_step
            bar.refresh()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._shown_step or not self._should_update(step, total_steps(trainer) or 0):
            return
        self._shown_step = step
        metrics = self.get_metrics(trainer, pl_module)
        if self.plain:
            self._print(trainer, metrics)
        else:
            self.train_progress_bar.n = step
            self.train_progress_bar.set_postfix(metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:  # `validate` ends with Lightning's table
            return
        shown = {name: value for name, value in self.get_metrics(trainer, pl_module).items() if name.startswith("val")}
        if self.plain and self.is_enabled and shown:
            self._print(trainer, shown)

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name in ON_DEVICE}
        metrics |= super().get_metrics(trainer, pl_module)  # type: ignore[arg-type]
        metrics.pop("v_num", None)
        names = [name for name in FIRST if name in metrics] + [name for name in metrics if name not in FIRST]
        return {name: readable(metrics[name]) for name in names}

    def _print(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        total, step = total_steps(trainer), trainer.global_step
        elapsed_s = perf_counter() - self._start_s
        clock = self._clock(elapsed_s)
        if total and step > self._first_step:
            clock += "<" + self._clock(elapsed_s / (step - self._first_step) * (total - step))
        print(" | ".join([f"step {step}/{total or '?'}", *(f"{k} {v}" for k, v in metrics.items()), clock]), flush=True)

    @staticmethod
    def _clock(seconds: float) -> str:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes:02}:{rest:02}"


def total_steps(trainer: Trainer) -> int | None:
    """Optimizer steps of the whole run; None where nothing bounds it."""
    total = trainer.estimated_stepping_batches
    return int(total) if total not in (-1, float("inf")) else None


def readable(value: Any) -> str:
    """A number in at most 8 characters: 12.3k, 3.0e-04, 5.123."""
    if isinstance(value, str):
        return value
    number = float(value)
    if not isfinite(number):
        return str(number)
    if abs(number) >= 1e4:
        power = 3 if abs(number) >= 1e9 else 2 if abs(number) >= 1e6 else 1
        return f"{number / 1e3**power:.1f}{'kMG'[power - 1]}"
    if number == int(number):
        return str(int(number))
    return f"{number:.1e}" if abs(number) < 1e-2 else f"{number:.4g}"
