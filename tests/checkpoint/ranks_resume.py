"""A run on each rank, saved on its way and perhaps resumed: what a rank saw of it. In float64, on the text in tests/data."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from scenario import full, global_name, quiet, trainer_of

from lightning_3d.callbacks import Checkpoint
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.strategy import ThreeDStrategy

DATA = Path(__file__).parent.parent / "data" / "nanoset_datatrove"
GLOBAL_BATCH, SEQUENCE, STEPS, SAVED = 8, 16, 8, 5


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    mode: str = "ddp"
    virtual: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        return max(2, self.pp)

    def __str__(self) -> str:
        parts = [
            f"dp{self.dp}tp{self.tp}pp{self.pp}",
            self.mode,
            *["sp"] * self.sequence_parallel,
            *[f"v{self.virtual}"] * (self.virtual > 1),
        ]
        return "-".join(parts)

    def strategy(self) -> ThreeDStrategy:
        return ThreeDStrategy(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            pp_engine="interleaved_1f1b" if self.virtual > 1 else "1f1b",
            virtual_stages=self.virtual,
            data_parallel=self.mode,  # type: ignore[arg-type]
            dp_replicate=2 if self.mode == "hsdp" else 1,
            sequence_parallel=self.sequence_parallel,
        )


@dataclass(frozen=True)
class Run:
    """A fit of STEPS steps that saves at step SAVED, unless it says otherwise."""

    layout: Layout
    folder: str
    resume: str | None = None
    accumulate: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()

    def module(self) -> LlamaModule:
        """Sizes that tp does not divide, GQA; learning rates that change in every step."""
        sizes = {"vocab_size": 515, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 4, "num_attention_heads": 4}
        llama = LlamaConfig(**sizes | {"num_key_value_heads": 4, "max_position_embeddings": SEQUENCE} | self.model)
        optim = AdamW(learning_rate=1e-2, lr_warmup_steps=3, weight_decay_exclude_named_params=[".*norm.*"])
        return LlamaModule(llama, optim, z_loss_coefficient=1e-3)

    def data(self) -> NanosetDataModule:
        rows = GLOBAL_BATCH // self.layout.dp // self.accumulate
        count = min(self.layout.microbatches, rows)
        return NanosetDataModule(
            str(DATA),
            SEQUENCE,
            micro_batch_size=rows // count,
            batch_accumulation_per_replica=count,
            validation_folder=str(DATA),
            validation_samples=3,
        )


class Record(pl.Callback):
    """Loss and learning rate of each batch; state when training starts and after each step, of rank and whole model."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "states": {}}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen["first_step"] = trainer.global_step
        self.seen["consumed_at_start"] = trainer.datamodule.consumed_samples
        if trainer.global_step:
            self.seen["loaded"] = state(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["losses"].append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if trainer.global_step in (SAVED, STEPS):
            self.seen["states"][trainer.global_step] = state(trainer, module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen["consumed"] = trainer.datamodule.consumed_samples


def state(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank's parameters, at full shape."""
    moments = trainer.optimizers[0].state
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[global_name(name)] = full(parameter)
        tensors |= {f"{global_name(name)}:{key}": full(value) for key, value in moments[parameter].items()}
    return tensors


def fit(run: Run) -> dict[str, Any]:
    """What this rank saw; ``stopped`` is the exit code if SIGTERM ended the run, ``error`` what a ConfigError said."""
    quiet()
    torch.set_default_dtype(torch.float64)
    record = Record()
    checkpoint = Checkpoint(**{"checkpoints_path": run.folder, "checkpoint_interval": SAVED} | run.checkpoint)
    options = {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 0, "enable_checkpointing": True} | run.trainer
    callbacks = [record, *(callback() for callback in run.callbacks), checkpoint]
    trainer = trainer_of(
        run.layout.strategy(),
        run.layout.world_size,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        **options,
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(run.module(), datamodule=run.data(), ckpt_path=run.resume)
    except SIGTERMException as stop:
        record.seen["stopped"] = stop.code
    except ConfigError as error:
        record.seen["error"] = str(error)
    assert signal.getsignal(signal.SIGTERM) == before
    return record.seen | {"step": trainer.global_step, "last": checkpoint.last_model_path}
