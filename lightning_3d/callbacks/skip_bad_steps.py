"""Steps that would spoil the weights are left out.

One batch of bad luck (an overflow, a broken record) makes gradients that are not finite, and an optimizer that takes them has lost the
run. Here the norm of all gradients is looked at before each step, by all ranks together; a bad one empties the gradients, and an
optimizer without gradients changes nothing, neither weights nor moments. The learning rate and the data go on.

It costs a norm and a wait for the device in every step.
"""

import math
from collections import deque
from statistics import fmean, pstdev
from typing import Any

from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.callbacks.checkpoint import Checkpoint
from lightning_3d.callbacks.grad_norm import total_norm
from lightning_3d.callbacks.log_due import log_due
from lightning_3d.checkpoint import latest_checkpoint
from lightning_3d.errors import ConfigError


class SkipBadSteps(Callback):
    """Skips optimizer steps whose loss or gradient norm is not finite; logs `skipped_steps`, how many so far.

    Args:
        max_in_a_row: end the run when more steps than this are skipped one after the other.
        spike_stds: skip steps too whose norm is above the mean of the last ones by so many standard deviations; null: none.
        spike_window: how many of the last good norms that mean is of; nothing is a spike before there are half as many.

    Raises:
        ConfigError: a number out of range; several optimizers; too many bad steps in a row, with the checkpoint to go on from.
    """

    def __init__(self, max_in_a_row: int = 10, spike_stds: float | None = None, spike_window: int = 100) -> None:
        for key, value, least in (("max_in_a_row", max_in_a_row, 0), ("spike_window", spike_window, 2)):
            if value < least:
                raise ConfigError(f"{key}={value} must be at least {least}")
        if spike_stds is not None and spike_stds <= 0:
            raise ConfigError(f"spike_stds={spike_stds} must be above 0")
        self.max_in_a_row, self.spike_stds = max_in_a_row, spike_stds
        self.skipped_steps = 0
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=spike_window)
        self._losses: list[Tensor] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) > 1:
            raise ConfigError(f"SkipBadSteps is for one optimizer, and there are {len(trainer.optimizers)}: leave it out")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Float[Tensor, ""]) -> None:
        self._losses.append(loss.detach())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        losses, self._losses = [float(loss) for loss in self._losses], []
        norm = float(total_norm(trainer, pl_module))
        reason = self._is_bad(norm, losses)
        if not trainer.strategy.reduce_boolean_decision(reason is not None, all=False):
            self._in_a_row = 0
            self._norms.append(norm)
            return
        optimizer.zero_grad(set_to_none=True)
        self.skipped_steps += 1
        self._in_a_row += 1
        if self._in_a_row > self.max_in_a_row:
            first = trainer.global_step + 2 - self._in_a_row
            raise ConfigError(
                f"max_in_a_row={self.max_in_a_row}: steps {first} to {trainer.global_step + 1} were bad ({reason or 'on another rank'}); "
                f"{_advice(trainer)}, with a lower learning rate or other data"
            )

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if log_due(trainer):
            pl_module.log("skipped_steps", float(self.skipped_steps))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps, "in_a_row": self._in_a_row, "norms": list(self._norms)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps, self._in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]
        self._norms.clear()
        self._norms.extend(state_dict["norms"])

    def _is_bad(self, norm: float, losses: list[float]) -> str | None:
        """Why the step must not be taken, or None."""
        if not all(map(math.isfinite, losses)):
            return f"the loss is {next(loss for loss in losses if not math.isfinite(loss))}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self.spike_stds is None or len(self._norms) < (self._norms.maxlen or 0) / 2:
            return None
        limit = fmean(self._norms) + self.spike_stds * pstdev(self._norms)
        return f"the gradient norm is {norm:.4g}, above {limit:.4g}" if norm > limit else None


def _advice(trainer: Trainer) -> str:
    """Which checkpoint to go on from."""
    folders = [callback.checkpoints_path for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoint)]
    path = next(filter(None, map(latest_checkpoint, folders)), None) or trainer.ckpt_path  # what this run began from is older
    return f"go on from {path}" if path else "begin anew"
