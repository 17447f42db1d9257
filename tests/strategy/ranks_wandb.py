"""LlamaModule with our callbacks and W&B offline, on ranks."""

from typing import Any

import torch
from scenario import Replica, Scenario, global_batches, quiet, trainer_of


def run(s: Scenario, folder: str) -> dict[str, Any]:
    """Train two steps; gives what W&B was told (on rank 0) and Lightning's own numbers."""
    quiet()
    from lightning.pytorch.loggers import WandbLogger

    from lightning_3d.callbacks import GradNorm, Throughput
    from lightning_3d.model.config import LlamaConfig
    from lightning_3d.module import LlamaModule
    from lightning_3d.optim.adamw import AdamW
    from lightning_3d.strategy import ThreeDStrategy

    logger = WandbLogger(save_dir=folder, offline=True, project="test")
    strategy = ThreeDStrategy(**s.strategy())
    options = {"max_steps": 2, "log_every_n_steps": 1, "gradient_clip_val": 1.0, "callbacks": [GradNorm(), Throughput()]}
    trainer = trainer_of(strategy, s.world_size, logger=logger, **options)
    module = LlamaModule(LlamaConfig(**s.model), AdamW(lr_decay_style="constant"), z_loss_coefficient=1e-3)
    trainer.fit(module, Replica(strategy, global_batches(s, steps=2), s.rows))
    told = dict(logger.experiment.summary) if trainer.is_global_zero else {}
    if trainer.is_global_zero:
        logger.experiment.finish()
    return {"told": told, "seen": {name: float(value) for name, value in trainer.callback_metrics.items() if torch.is_tensor(value)}}
