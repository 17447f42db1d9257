"""AdamW and its learning rate in Nanotron's words, as one block of a recipe."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.optim.groups import decay_groups
from lightning_3d.optim.schedule import LearningRate, ScheduledLR


@dataclass(frozen=True)
class AdamW:
    """Settings of the optimizer and of its schedule (optim/schedule.py says what each of those means).

    Args:
        learning_rate: the peak.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        weight_decay_exclude_named_params: patterns of whole parameter names that are not decayed.
        fused: torch's fused kernel; null takes it.

    Raises:
        ConfigError: a beta outside [0, 1), a negative eps or weight_decay.
    """

    learning_rate: float = 3e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decay_exclude_named_params: Sequence[str] = field(default_factory=list)
    fused: bool | None = None
    lr_warmup_steps: int = 0
    lr_warmup_style: Literal["linear", "constant"] = "linear"
    lr_decay_style: Literal["linear", "cosine", "1-sqrt", "constant"] = "cosine"
    lr_decay_steps: int | None = None
    lr_decay_starting_step: int | None = None
    min_decay_lr: float = 0.0

    def __post_init__(self) -> None:
        for key in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} must be at least 0 and less than 1.")
        for key in ("adam_eps", "weight_decay"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key}: {getattr(self, key)} must be 0 or more.")

    def schedule(self, train_steps: int) -> LearningRate:
        """The learning rate of each of ``train_steps`` steps."""
        keys = ("learning_rate", "lr_warmup_steps", "lr_warmup_style", "lr_decay_style", "lr_decay_steps", "lr_decay_starting_step")
        return LearningRate(train_steps, min_decay_lr=self.min_decay_lr, **{key: getattr(self, key) for key in keys})

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], all_names: Iterable[str], train_steps: int
    ) -> tuple[torch.optim.AdamW, ScheduledLR]:
        """The optimizer of this rank's parameters, and its scheduler (one step an optimizer step).

        Args:
            parameters: this rank's, by their global names.
            all_names: the whole model's, which the exclusion patterns are checked against.
            train_steps: optimizer steps of the whole run.
        """
        groups = decay_groups(parameters, self.weight_decay, self.weight_decay_exclude_named_params, all_names)
        betas = (self.adam_beta1, self.adam_beta2)
        optimizer = torch.optim.AdamW(groups, self.learning_rate, betas, self.adam_eps, fused=self.fused is not False)
        return optimizer, ScheduledLR(optimizer, self.schedule(train_steps))
