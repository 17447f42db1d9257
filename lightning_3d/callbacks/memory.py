"""How much memory the fullest rank needs."""

import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.callbacks.log_due import log_due
from lightning_3d.callbacks.ranks import gather
from lightning_3d.planning.gpus import GIB


class Memory(Callback):
    """Logs, whenever a log is due, ``memory_gib``, the peak of the fullest rank in GiB, and ``memory_rank``, which rank that is.

    On CUDA the peak is what tensors took on the device since the last log (not measured on a GPU). On CPUs it is the resident set of the
    process since it began, its libraries included; a kernel that does not know peaks of a part of a run cannot be asked for one.
    """

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if log_due(trainer):
            peaks = gather(trainer, [peak_nbytes(trainer.strategy.root_device) / GIB])[:, 0]
            pl_module.log("memory_gib", peaks.max())
            pl_module.log("memory_rank", peaks.argmax().double())


def peak_nbytes(device: torch.device) -> int:
    """Bytes at the peak: of tensors since the last call on CUDA, of this process on CPUs."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
