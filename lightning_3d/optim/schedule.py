r"""The learning rate of each step, in Nanotron's words.

    learning_rate      ____________
                      /            \
                     /              \       cosine, linear or 1-sqrt (constant: no decay)
    above 0 at once /                \____  min_decay_lr, exactly, on the last step
                    |__|               lr_warmup_steps
                    |_______________|  lr_decay_starting_step, then lr_decay_steps

Nanotron's own schedule spends the first step at learning rate 0 and ends one step short of the minimum. Here step k (from 0) of a
linear warm-up over W steps has (k + 1) / W of the full rate, so step W - 1 is the peak; a decay of n steps starting at s reaches its
minimum on step s + n - 1; without a warm-up the first step is the peak. The rate is a pure function of the step, so a resumed run
continues exactly, and a run resumed under other settings follows those.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_3d.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step.

    Args:
        train_steps: optimizer steps of the whole run.
        learning_rate: the peak.
        lr_warmup_steps: steps of the warm-up.
        lr_warmup_style: linear climbs to the peak, constant is at the peak from the first step.
        lr_decay_style: linear, cosine, 1-sqrt (the cool-down of warmup-stable-decay), or constant for none.
        lr_decay_steps: steps of the decay; null means until the end.
        lr_decay_starting_step: steps before the decay begins; null means right after the warm-up.
        min_decay_lr: the rate on the decay's last step, and after it.

    Raises:
        ConfigError: the settings contradict one another.
    """

    train_steps: int
    learning_rate: float
    lr_warmup_steps: int = 0
    lr_warmup_style: str = "linear"
    lr_decay_style: str = "linear"
    lr_decay_steps: int | None = None
    lr_decay_starting_step: int | None = None
    min_decay_lr: float = 0.0

    def __post_init__(self) -> None:
        self._check_styles()
        self._check_numbers()
        if self.lr_decay_style != "constant" and self.decay_end_step > self.train_steps:
            log.warning(
                "The learning rate does not reach min_decay_lr: its decay ends at step %d (lr_warmup_steps, lr_decay_starting_step and "
                "lr_decay_steps), but training at step %d.",
                self.decay_end_step,
                self.train_steps,
            )

    def _check_styles(self) -> None:
        for key, choices in (("lr_warmup_style", ("linear", "constant")), ("lr_decay_style", ("linear", "cosine", "1-sqrt", "constant"))):
            if getattr(self, key) not in choices:
                raise ConfigError(f"{key}: {getattr(self, key)} is not known; choose {', '.join(choices)}.")

    def _check_numbers(self) -> None:
        if self.train_steps < 1:
            raise ConfigError(f"max_steps: {self.train_steps} gives the learning rate no end to decay to; set trainer.max_steps.")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate: {self.learning_rate} must be greater than 0.")
        if not 0 <= self.min_decay_lr <= self.learning_rate:
            raise ConfigError(f"min_decay_lr: {self.min_decay_lr} must lie between 0 and learning_rate: {self.learning_rate}.")
        if self.lr_warmup_steps < 0:
            raise ConfigError(f"lr_warmup_steps: {self.lr_warmup_steps} must be 0 or more.")
        if self.lr_decay_steps is not None and self.lr_decay_steps < 1:
            raise ConfigError(f"lr_decay_steps: {self.lr_decay_steps} must be 1 or more; lr_decay_style: constant decays not at all.")
        if self.decay_starting_step < self.lr_warmup_steps:
            raise ConfigError(
                f"lr_decay_starting_step: {self.decay_starting_step} lies within lr_warmup_steps: {self.lr_warmup_steps}; "
                "let the decay start when the warm-up is over."
            )

    @property
    def decay_starting_step(self) -> int:
        """Steps before the decay begins."""
        return self.lr_warmup_steps if self.lr_decay_starting_step is None else self.lr_decay_starting_step

    @property
    def decay_end_step(self) -> int:
        """Steps after which the rate stays at its minimum."""
        if self.lr_decay_steps is None:
            return max(self.train_steps, self.decay_starting_step)
        return self.decay_starting_step + self.lr_decay_steps

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        if step < self.lr_warmup_steps and self.lr_warmup_style == "linear":
            return self.learning_rate * (step + 1) / self.lr_warmup_steps
        # The decay runs from the last step at the peak to the last step of all, both included.
        peak, end = max(self.decay_starting_step - 1, 0), self.decay_end_step - 1
        if step <= peak:
            return self.learning_rate
        remaining = _REMAINING[self.lr_decay_style](min((step - peak) / (end - peak), 1.0)) if end > peak else 0.0
        return self.min_decay_lr + (self.learning_rate - self.min_decay_lr) * remaining


_REMAINING = {  # what remains of learning_rate - min_decay_lr when a fraction x of the decay is done
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "constant": lambda x: 1.0,
}


class ScheduledLR(LRScheduler):
    """Sets every parameter group's learning rate to the schedule's; to be stepped once per optimizer step (in Lightning `interval: step`).

    Its state is the step and nothing else. A stock scheduler also saves one base rate per parameter group, and pipeline stages may differ
    in the number of their groups.
    """

    def __init__(self, optimizer: Optimizer, schedule: LearningRate) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of the coming step, once per parameter group."""
        return [self.schedule.at(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after that many steps, by this schedule's settings."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate
