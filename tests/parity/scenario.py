"""What a parity run does on each rank: a Trainer with ThreeDStrategy on the batches that the reference sees, in float64."""

import logging
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SEQUENCE = 16
CLIP, LEARNING_RATE = 0.25, 1e-2
STEPS = 3


@dataclass(frozen=True)
class Scenario:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    engine: str = "1f1b"
    mode: str = "ddp"
    accumulate: int = 1
    tied: bool = False
    optimizer: str = "sgd"
    virtual: int = 1
    loss_chunks: int = 1
    cp: int = 1
    method: str = "ring"
    recompute: str = "none"
    cpu_offload: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> int:
        return max(2, self.pp) * (2 if self.engine == "dualpipe_v" else 1)

    @property
    def rows(self) -> int:
        """Sequences of one replica's batch; two a microbatch where that stays small, and the same for all engines where they can."""
        return max(2, self.pp) * (2 if self.world_size < 8 or self.engine == "dualpipe_v" else 1)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def model(self) -> dict[str, Any]:
        """Layers and vocabulary that do not divide; GQA; heads as tp and ulysses need them."""
        parts = self.tp * (self.cp if self.method == "ulysses" else 1)
        heads, kv = (8, 8) if parts == 8 else (4, 4) if parts == 4 else (4, 2)
        return {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 45,
            "num_hidden_layers": 3 if self.stages <= 2 else 5 if self.stages <= 4 else 9,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": SEQUENCE,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "attention_bias": True,
            "initializer_range": 0.2,  # large, so that every path matters in the gradients
        }

    def strategy(self) -> dict[str, Any]:
        return {
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "cp_method": self.method if self.cp > 1 else None,
            "recompute": self.recompute,
            "cpu_offload": self.cpu_offload,
            "sequence_parallel": self.sequence_parallel,
            "pp_engine": self.engine,
            "virtual_stages": self.virtual,
            "data_parallel": self.mode,
            "dp_replicate": 2 if self.mode == "hsdp" else 1,
            "batch_accumulation_per_replica": self.microbatches,
        }


def global_batches(s: Scenario, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Batches of all replicas; labels masked unevenly: the first replica's almost all."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps * s.accumulate):
        ids = torch.randint(0, s.model["vocab_size"], (s.dp * s.rows, SEQUENCE + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        if s.cp == 1:
            labels[: s.rows, 1:] = -100
        else:  # all that the last rank of cp has of the first replica, but in one row
            chunk = SEQUENCE // (2 * s.cp)
            labels[: s.rows - 1, SEQUENCE // 2 - chunk : SEQUENCE // 2 + chunk] = -100
        labels[0] = -100
        labels[-1, 3] = 5
        batches.append({"input_ids": ids[:, :-1].clone(), "labels": labels})
    return batches


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, in every placement: FSDP cut last, so its cut is undone first (torch's full_tensor fails on some uneven ones)."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    whole = tensor.to_local().detach().clone()
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            parts = [whole] * tensor.device_mesh.size(axis)
            dist.all_gather_object(parts, whole, group=tensor.device_mesh.get_group(axis))
            whole = torch.cat(parts, placement.dim)
    return whole


def global_name(name: str) -> str:
    return name.split(".", 2)[2]  # stages.0.layers.3...


def run(s: Scenario) -> dict[str, Any]:
    """Train STEPS optimizer steps; gives what this rank saw."""
    quiet()
    import lightning.pytorch as pl

    from lightning_3d.model.config import LlamaConfig
    from lightning_3d.module import LlamaModule
    from lightning_3d.strategy import ThreeDStrategy

    torch.set_default_dtype(torch.float64)

    class Module(LlamaModule):
        def configure_optimizers(self) -> Any:
            if s.optimizer == "sgd":
                return torch.optim.SGD(self.parameters(), LEARNING_RATE)
            return torch.optim.AdamW(self.parameters(), LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    seen: dict[str, Any] = {"losses": [], "norms": [], "gradients": None}

    class Record(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen["start"] = {global_name(n): full(p) for n, p in module.named_parameters()}

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if seen["gradients"] is None:
                seen["gradients"] = {global_name(n): full(p.grad) for n, p in module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            # Lightning divides what it keeps of the loss by the accumulation, as the reference's backward does.
            seen["losses"].append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
            if (index + 1) % trainer.accumulate_grad_batches == 0:
                seen["norms"].append(float(trainer.strategy.last_grad_norm))

    strategy = ThreeDStrategy(**s.strategy())
    module = Module(LlamaConfig(**s.model), z_loss_coefficient=1e-3, loss_chunks=s.loss_chunks)
    trainer = trainer_of(
        strategy, s.world_size, max_steps=STEPS, accumulate_grad_batches=s.accumulate, gradient_clip_val=CLIP, callbacks=[Record()]
    )
    trainer.fit(module, Replica(strategy, global_batches(s), s.rows))
    seen["weights"] = {global_name(n): full(p) for n, p in module.named_parameters()}
    return seen | {"coord": asdict(strategy.mesh.coord)}


class Replica:
    """This rank's part of the global batches; made anew by each iteration, when the mesh is known."""

    def __init__(self, strategy: Any, batches: list[dict[str, Tensor]], rows: int) -> None:
        self.strategy, self.batches, self.rows = strategy, batches, rows

    def __iter__(self) -> Any:
        start = self.strategy.mesh.coord.dp * self.rows
        return iter([{key: value[start : start + self.rows] for key, value in batch.items()} for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


def trainer_of(strategy: Any, devices: int, **options: Any) -> Any:
    import lightning.pytorch as pl

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False} | options
    options = {"use_distributed_sampler": False, "num_sanity_val_steps": 0} | options
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
