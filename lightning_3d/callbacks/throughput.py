"""How fast training runs, in the units that pretraining logs use.

Lightning's ThroughputMonitor multiplies by the world size, which counts tensor and pipeline ranks as if each read its own
samples: with pp=2 it shows twice the truth. Here tokens are those of the global batch. The clock stands still during the first step
(compilation, allocation, connections), validation and checkpoints. It is read when a log is due and nowhere else, after the device
has caught up.

FLOPs are the model's: recomputation never counts. `attention="full"` counts every token as seeing the whole sequence, as Nanotron and
TorchTitan do; `"causal"` counts the half that a causal model needs, as Megatron-LM does. For a Llama of 8B at S=8192 the difference
is 11%. A module without a Llama's config counts as 6 operations per parameter and token.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_3d.callbacks.log_due import log_due
from lightning_3d.callbacks.parameters import parameter_counts
from lightning_3d.callbacks.peak import peak_flops_per_s
from lightning_3d.model.config import LlamaConfig
from lightning_3d.placement import SEQUENCE_IDS


class Throughput(Callback):
    """Logs tokens_per_sec and what follows from it, consumed_tokens, global_batch_size (tokens) and lr, whenever a log is due.

    Where the data module knows what it has read of which set, ``data/consumed_tokens/<set>`` too.

    Args:
        attention: what the FLOPs of attention count: "full" or "causal" (see above).
        flops_per_token: model FLOPs of one token, forward and backward, for a module that is no Llama; null means 6 per parameter.
        peak_flops_per_s: of one device, for `mfu`; null looks the device up, and logs no `mfu` where it is not known.
    """

    def __init__(
        self,
        attention: Literal["full", "causal"] = "full",
        flops_per_token: float | None = None,
        peak_flops_per_s: float | None = None,
    ) -> None:
        self.attention = attention
        self.flops_per_token = flops_per_token
        self.peak_flops_per_s = peak_flops_per_s
        self.consumed_tokens = 0
        self._lr: float | Tensor | None = None
        self._start_s: float | None = None  # None until the first step is over
        self._paused_s: float | None = None
        self._step_tokens = self._window_tokens = self._window_steps = 0
        self._parameters = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = parameter_counts(trainer, pl_module)[0]  # once: under ThreeDStrategy all ranks talk
        self._start_s = self._paused_s = self._lr = None
        self._step_tokens = self._window_tokens = self._window_steps = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._start_s is not None and self._paused_s is not None:
            self._start_s += perf_counter() - self._paused_s
        self._paused_s = None

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._lr is None:  # the first optimizer's; schedulers have moved it on by the time of on_train_batch_end
            self._lr = optimizer.param_groups[0]["lr"]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        self._step_tokens += global_batch_tokens(trainer, batch)
        if self._lr is None:  # still accumulating
            return
        self.consumed_tokens += self._step_tokens
        self._window_tokens += self._step_tokens
        self._window_steps += 1
        if first := self._start_s is None:
            self._restart(trainer)
        if log_due(trainer):
            speeds = {} if first else self._speeds(trainer, pl_module, sequence_length(trainer, batch))
            self._log(pl_module, speeds | self._counts() | consumed_of_sets(trainer))
            self._restart(trainer)
        self._step_tokens, self._lr = 0, None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause(trainer)

    @override
    def state_dict(self) -> dict[str, int]:
        return {"consumed_tokens": self.consumed_tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.consumed_tokens = state_dict["consumed_tokens"]

    def _pause(self, trainer: Trainer) -> None:
        """Stop the clock until the next training batch."""
        if self._paused_s is None:
            self._paused_s = now_s(trainer)

    def _restart(self, trainer: Trainer) -> None:
        self._start_s = now_s(trainer)
        self._window_tokens = self._window_steps = 0

    def _speeds(self, trainer: Trainer, pl_module: LightningModule, tokens_in_sequence: int) -> dict[str, float]:
        assert self._start_s is not None
        elapsed_s = max(now_s(trainer) - self._start_s, 1e-9)
        tokens_per_s = self._window_tokens / elapsed_s
        flops_per_s = tokens_per_s / trainer.world_size * self._flops_per_token(pl_module, tokens_in_sequence)
        speeds = {
            "tokens_per_sec": tokens_per_s,
            "tokens_per_sec_per_gpu": tokens_per_s / trainer.world_size,
            "time_per_iteration_ms": 1e3 * elapsed_s / self._window_steps,
            "model_tflops_per_gpu": flops_per_s / 1e12,
        }
        peak = self.peak_flops_per_s or peak_flops_per_s(trainer.strategy.root_device)
        return speeds | ({"mfu": flops_per_s / peak} if peak else {})

    def _counts(self) -> dict[str, float]:
        assert self._lr is not None
        return {"consumed_tokens": self.consumed_tokens, "global_batch_size": self._step_tokens, "lr": float(self._lr)}

    def _flops_per_token(self, pl_module: LightningModule, tokens_in_sequence: int) -> float:
        config = getattr(pl_module, "llama", None)
        if self.flops_per_token is None and isinstance(config, LlamaConfig):
            return config.flops_per_token(tokens_in_sequence, causal=self.attention == "causal")
        return self.flops_per_token or 6.0 * self._parameters

    @staticmethod
    def _log(pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # float64: in Lightning's float32, token counts would stop being exact at 17 million.
            pl_module.log(name, torch.tensor(value, dtype=torch.float64), prog_bar=name in ("tokens_per_sec", "lr"))


def now_s(trainer: Trainer) -> float:
    """The clock, in seconds, once the device has done all that was asked of it."""
    if trainer.strategy.root_device.type != "cpu":
        torch.accelerator.synchronize()
    return perf_counter()


def global_batch_tokens(trainer: Trainer, batch: Any) -> int:
    """Tokens of one Trainer batch over all replicas: the data module's number, else this replica's batch times their count."""
    known = getattr(getattr(trainer, "datamodule", None), "global_batch_tokens", None)
    if known is not None:
        return int(known)
    replicas = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1}
    return _tokens(batch).numel() * int(replicas["num_replicas"])


def consumed_of_sets(trainer: Trainer) -> dict[str, float]:
    """Tokens trained on of each set, where the data module counts them."""
    tokens = getattr(getattr(trainer, "datamodule", None), "consumed_tokens", {})
    return {f"data/consumed_tokens/{name}": float(count) for name, count in tokens.items()}


def sequence_length(trainer: Trainer, batch: Any) -> int:
    """S: the size of the last dim of the batch's token ids, times cp where the batch holds this rank's part of the sequences."""
    tokens = _tokens(batch)
    parts = trainer.strategy.dims.cp if isinstance(batch, Mapping) and SEQUENCE_IDS in batch else 1  # type: ignore[attr-defined]
    return tokens.shape[-1] * parts if tokens.ndim else 1


def _tokens(batch: Any) -> Tensor:
    """`input_ids`, or else the first tensor of the batch."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return batch["input_ids"]
    return next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), torch.empty(0))
