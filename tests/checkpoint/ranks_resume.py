"""A run on each rank, saved on its way and perhaps resumed: what a rank saw of it. In float64, on the text in tests/data."""

import random
import resource
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from scenario import global_name, quiet, trainer_of
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.callbacks import Checkpoint
from lightning_3d.checkpoint import restore
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import CheckpointWriteError, ConfigError
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
    cp: int = 1
    mode: str = "ddp"
    virtual: int = 1
    sequence_parallel: bool = False
    background: bool = False
    recompute: Any = "none"
    cpu_offload: bool = False
    engine: str = ""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> int:
        return max(2, self.pp)

    def __str__(self) -> str:
        parts = [
            f"dp{self.dp}tp{self.tp}pp{self.pp}",
            self.mode,
            *[f"cp{self.cp}"] * (self.cp > 1),
            *["sp"] * self.sequence_parallel,
            *[f"v{self.virtual}"] * (self.virtual > 1),
            *[self.engine] * bool(self.engine),
            *["offload"] * self.cpu_offload,
        ]
        return "-".join(parts)

    def strategy(self) -> ThreeDStrategy:
        return ThreeDStrategy(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            pp_engine=self.engine or ("interleaved_1f1b" if self.virtual > 1 else "1f1b"),
            virtual_stages=self.virtual,
            data_parallel=self.mode,  # type: ignore[arg-type]
            dp_replicate=2 if self.mode == "hsdp" else 1,
            sequence_parallel=self.sequence_parallel,
            async_checkpoint=self.background,
            recompute=self.recompute,
            cpu_offload=self.cpu_offload,
        )


@dataclass(frozen=True)
class Run:
    """A fit of STEPS steps that saves at step SAVED, unless it says otherwise."""

    layout: Layout
    folder: str
    resume: str | None = None
    resume_from_older: bool = False
    accumulate: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    module_type: type[LlamaModule] = LlamaModule

    def module(self) -> LlamaModule:
        """Sizes that tp does not divide, GQA; learning rates that change in every step."""
        sizes = {"vocab_size": 515, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 4, "num_attention_heads": 4}
        llama = LlamaConfig(**sizes | {"num_key_value_heads": 4, "max_position_embeddings": SEQUENCE} | self.model)
        optim = AdamW(learning_rate=1e-2, lr_warmup_steps=3, lr_decay_steps=5, weight_decay_exclude_named_params=[".*norm.*"])
        return self.module_type(llama, optim, z_loss_coefficient=1e-3)

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
    """Number, loss and learning rate of each batch; state when training starts and after each step, of rank and whole model."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "batches": []}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen["first_step"] = trainer.global_step
        self.seen["consumed_at_start"] = trainer.datamodule.consumed_samples
        if trainer.global_step:
            self.seen["loaded"] = state(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen["batches"].append(batch_idx)
        self.seen["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["losses"].append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if trainer.global_step == SAVED:
            self.seen["saved"] = state(trainer, module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen["consumed"] = trainer.datamodule.consumed_samples
        self.seen["final"] = state(trainer, module)


class Momentum(LlamaModule):
    """The same model, another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Noisy(LlamaModule):
    """Draws from this rank's generators of torch, numpy and Python in each step; in each rank and run they begin differently."""

    def on_fit_start(self) -> None:
        seed = self.global_rank + 10 * (self.trainer.ckpt_path is not None)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()) + np.random.rand() + random.random())


class Overflow(LlamaModule):
    """The loss of the fifth step is infinite on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_bad = batch_idx == 4 and self.global_rank == 1
        return super().training_step(batch, batch_idx) * (torch.inf if is_bad else 1)


class NoDecay(LlamaModule):
    """The same optimizer with other options."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["weight_decay"] = 0.0
        return configured


class WithAnything(LlamaModule):
    """Hyper-parameters as people have them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"corpus": Path("corpus"), "activation": torch.tanh, "sizes": [1, (2, 3)], "mixed": [torch.tanh, 1]})


class FromWeights(LlamaModule):
    """Starts from the weights of a checkpoint, with an optimizer of its own."""

    path = ""

    def on_fit_start(self) -> None:
        restore(self.path, self)


def state(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank's parameters, at full shape."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # validation has left whole parameters in place of the optimizer's
    moments = trainer.optimizers[0].state
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[global_name(name)] = parameter
        tensors |= {f"{global_name(name)}:{key}": value for key, value in moments[parameter].items()}
    return whole(tensors)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Many tensors with one gather for each axis of their meshes; cuts are undone in the order of the axes, fsdp's before tp's."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    held = {name: getattr(tensor, "_local_tensor", tensor).detach().clone() for name, tensor in tensors.items()}
    for mesh in {tensor.device_mesh for tensor in sharded.values()}:
        for axis in range(mesh.ndim):
            cuts = {
                name: t.placements[axis].dim
                for name, t in sharded.items()
                if t.device_mesh == mesh and not t.placements[axis].is_replicate()
            }
            parts: list[Any] = [None] * mesh.size(axis)
            dist.all_gather_object(parts, {name: held[name] for name in cuts}, group=mesh.get_group(axis))
            held |= {name: torch.cat([part[name] for part in parts], dim) for name, dim in cuts.items()}
    return held


class Limited(pl.Callback):
    """Rank 1 cannot write files of more than some bytes until the end of a step; steps that had a checkpoint when they began."""

    def __init__(self, nbytes: int, until: int) -> None:
        self.nbytes, self.until = nbytes, until

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, resource.RLIM_INFINITY))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.until:
            self.teardown(trainer, module, "fit")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.teardown(trainer, module, "fit")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


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
    trainer.strategy.resume_from_older = run.resume_from_older
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(run.module(), datamodule=run.data(), ckpt_path=run.resume)
    except SIGTERMException as stop:
        record.seen["stopped"] = stop.code
    except (ConfigError, CheckpointWriteError) as error:
        record.seen["error"] = str(error)
    assert signal.getsignal(signal.SIGTERM) == before
    return record.seen | {"step": trainer.global_step, "last": checkpoint.last_model_path, "copied": trainer.strategy.saver.copied_nbytes}


def fit_from_weights(run: Run, path: str) -> dict[str, Any]:
    """A new run that takes its weights from a checkpoint."""
    FromWeights.path = path
    return fit(replace(run, module_type=FromWeights))


def fit_with_model_checkpoints(run: Run) -> dict[str, Any]:
    """Lightning's own callback: the best two of a metric and the last; every third step without optimizer state."""
    quiet()
    torch.set_default_dtype(torch.float64)
    best = ModelCheckpoint(f"{run.folder}/best", "{step}", monitor="val_lm_loss", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(f"{run.folder}/steps", "{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
    options = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": 2, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    trainer = trainer_of(run.layout.strategy(), run.layout.world_size, callbacks=[best, steps], **options)
    trainer.fit(run.module(), datamodule=run.data())
    metric = float(trainer.callback_metrics["val_lm_loss"])
    (again,) = trainer.validate(ckpt_path="best", datamodule=run.data(), verbose=False)
    return {"metric": metric, "best": best.best_model_path, "score": float(best.best_model_score), "again": again["val_lm_loss"]}


def evaluate(run: Run, path: str) -> dict[str, float]:
    """Validation and test metrics of a checkpoint."""
    quiet()
    torch.set_default_dtype(torch.float64)
    trainer = trainer_of(run.layout.strategy(), run.layout.world_size)
    module, data = run.module(), run.data()
    (validation,) = trainer.validate(module, data, ckpt_path=path, verbose=False)
    (test,) = trainer.test(module, data, ckpt_path=path, verbose=False)
    return {**validation, **test}
