"""Runs that begin from a Hugging Face folder, on each rank: what they begin with, what they read of it, and what they save."""

from typing import Any

import lightning.pytorch as pl
from ranks_resume import Layout, whole
from scenario import global_name, quiet, trainer_of
from torch import Tensor

from lightning_3d.callbacks import Checkpoint
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.model.hf import HFWeights
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.data import local
from lightning_3d.synthetic_datamodule import SyntheticDataModule

LR = AdamW(learning_rate=1e-2, lr_warmup_steps=1)


class Begin(pl.Callback):
    """The whole weights when training starts, saved where there is a path."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen["own"] = {global_name(name): local(parameter).numel() for name, parameter in module.named_parameters()}
        self.seen["begin"] = whole({global_name(name): parameter for name, parameter in module.named_parameters()})
        if self.path:
            trainer.save_checkpoint(self.path)


class Counting(HFWeights):
    """Notes how much was asked for."""

    asked: dict[str, int] = {}

    def read(self, name: str, region: tuple[slice, ...] = (slice(None),)) -> Tensor:
        piece = super().read(name, region)
        self.asked[name] = self.asked.get(name, 0) + piece.numel()
        return piece


class Begins(LlamaModule):
    """Counts what it reads."""

    def _weights_to_start_from(self) -> HFWeights | None:
        super()._weights_to_start_from()
        return None if self.init_from is None else Counting(self.init_from)


def begin(layout: Layout, saves: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By folder: the whole weights that a run in the layout begins with, and its numbers of elements held and read."""
    quiet()
    seen = {}
    for folder, path in saves.items():
        callback, Counting.asked = Begin(path), {}
        trainer = trainer_of(layout.strategy(), layout.world_size, max_steps=1, callbacks=[callback])
        data = SyntheticDataModule(320, 16, batch_accumulation_per_replica=layout.microbatches)
        trainer.fit(Begins(init_from=folder), data)
        seen[folder] = callback.seen | {"asked": Counting.asked}
    return seen


def fit(layout: Layout, module: dict[str, Any], data: str, checkpoints: str, resume: str | None = None, steps: int = 4) -> dict[str, Any]:
    """A short run on a Nanoset: the weights that training started with."""
    quiet()
    callback = Begin(None)
    callbacks = [callback, Checkpoint(checkpoints, checkpoint_interval=2)]
    trainer = trainer_of(
        layout.strategy(), layout.world_size, max_steps=steps, max_epochs=-1, callbacks=callbacks, enable_checkpointing=True
    )
    nanoset = NanosetDataModule(data, 32, micro_batch_size=2, batch_accumulation_per_replica=layout.microbatches)
    trainer.fit(LlamaModule(**module, optim=LR), nanoset, ckpt_path=resume)
    return {"begin": callback.seen["begin"], "end": whole({global_name(n): p for n, p in trainer.lightning_module.named_parameters()})}
