"""The gradient norm, before clipping.

Lightning shows no gradient norm, and its `grad_norm` utility sees one process: a stage of a pipeline, a shard of a matrix.
ThreeDStrategy computes the whole model's, reduced over every axis; other strategies hold whole gradients on each
rank, or DTensors that reduce themselves (FSDP2). Lightning's FSDP1 strategy keeps local shards: there the norm is this rank's.
"""

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.callbacks.log_due import for_the_bar, log_due


class GradNorm(Callback):
    """Logs `grad_norm`, the 2-norm of all gradients of an optimizer step before clipping, whenever a log is due."""

    def __init__(self) -> None:
        self._norm: Tensor | None = None
        self._stepped = False

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._stepped = True
        if log_due(trainer) and not _clipping_computes_it(trainer):
            self._norm = total_norm(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int) -> None:
        if self._stepped and log_due(trainer):
            norm = getattr(trainer.strategy, "last_grad_norm", None) if self._norm is None else self._norm
            assert norm is not None, "clipping by norm computes it"
            pl_module.log("grad_norm", norm, prog_bar=for_the_bar(trainer))
        self._norm, self._stepped = None, False


def total_norm(trainer: Trainer, module: LightningModule) -> Float[Tensor, ""]:
    """The 2-norm over the gradients of all parameters; 0 where there are none."""
    if hasattr(trainer.strategy, "gradient_norm"):
        return trainer.strategy.gradient_norm()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _clipping_computes_it(trainer: Trainer) -> bool:
    """Whether the strategy keeps the norm that clipping, later in the step, needs anyway."""
    by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
    return bool(trainer.gradient_clip_val) and by_norm and hasattr(trainer.strategy, "last_grad_norm")
