"""What the planner expects of the run that is about to begin."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_3d.errors import ConfigError
from lightning_3d.planning.estimate import estimate
from lightning_3d.planning.gpus import GIB, find_gpu
from lightning_3d.planning.report import size
from lightning_3d.planning.setting import Setting


def expected_memory(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """The most that tensors will take on a rank, and on which stage; None of what cannot be planned."""
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "layout") or not hasattr(pl_module, "build_stage"):
        return None
    data: Any = getattr(trainer, "datamodule", None)
    lengths = getattr(data, "sequence_lengths", None) or [getattr(data, "sequence_length", None)]
    if None in lengths or not hasattr(data, "micro_batch_size"):
        return None
    try:
        setting = Setting(
            strategy.layout,
            strategy.pp_engine,
            strategy.microbatches,
            data.micro_batch_size,
            max(lengths),
            trainer.precision,
            bool(getattr(data, "mask_documents", False)),
            on_cpu=strategy.root_device.type == "cpu",
        )
        with torch.random.fork_rng(devices=[]):  # a run with this line is the run without it
            stage = estimate(pl_module, setting, find_gpu("h100-80gb")).worst  # sizes do not depend on the kind
    except ConfigError:  # batches of another kind than ours
        return None
    share = ""
    if strategy.root_device.type == "cuda":
        share = f" of {torch.cuda.get_device_properties(strategy.root_device).total_memory / GIB:.0f} GiB"
    where = f", most on pipeline coord {stage.coord}" if strategy.dims.pp > 1 else ""
    return f"about {size(stage.peak.total)}{share} of tensors a rank{where}"
