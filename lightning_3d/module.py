"""The LightningModule that pretrains a Llama."""

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.model.attention import check_attention
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.hf import HFWeights, read_hf_config
from lightning_3d.model.llama import Block, LlamaStage
from lightning_3d.model.loss import IGNORE_INDEX, chunked_token_losses, token_losses, z_losses
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.loss import vocab_parallel_argmax, vocab_parallel_chunked_losses, vocab_parallel_token_losses
from lightning_3d.parallel.pipeline import split_layers
from lightning_3d.parallel.plan import LLAMA_PLAN, check_plan
from lightning_3d.parallel.stages import global_name
from lightning_3d.pipeline_mixin import PipelineMixin
from lightning_3d.seeding import fill


class LlamaModule(PipelineMixin, pl.LightningModule):
    """Pretrains a Llama with AdamW; batches are {"input_ids": (B, S), "labels": (B, S)}, labels shifted, -100 masked.

    With "position_ids" (B, S) besides, positions within documents, attention stays within documents.

    Logs ``lm_loss`` (and ``z_loss``), ``val_lm_loss``, ``test_lm_loss``: means over the unmasked tokens of the global batch.

    Args:
        llama: shape of the model; null takes it from ``init_from``.
        optim: optimizer and learning rate.
        z_loss_coefficient: weight of the log-sum-exp squared in the loss; 0 leaves it out.
        loss_chunks: parts of a microbatch's tokens whose logits are made one after the other, and again in the backward, so that those of
            a large vocabulary are never all there.
        stage_layers: layers of each pipeline stage; null balances them by cost.
        init_seed: every layout starts from the same weights for one seed.
        init_from: folder of a Hugging Face Llama to start from; each rank reads its own parts. A checkpoint that is resumed has its own.

    Raises:
        ConfigError: neither ``llama`` nor ``init_from`` is given, or the folder's model is none that this Llama can be.
    """

    tensor_parallel_plan = LLAMA_PLAN

    def __init__(
        self,
        llama: LlamaConfig | None = None,
        optim: AdamW | None = None,
        z_loss_coefficient: float = 0.0,
        loss_chunks: int = 1,
        stage_layers: list[int] | None = None,
        init_seed: int = 42,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        if llama is None and init_from is None:
            raise ConfigError(
                "model.llama: null: give the shape of the model, or model.init_from: a folder to take it and the weights from"
            )
        if loss_chunks < 1:
            raise ConfigError(f"model.loss_chunks={loss_chunks} must be at least 1, which computes the loss at once")
        self.init_from, self.loss_chunks = init_from, loss_chunks
        llama = llama or read_hf_config(str(init_from))
        self.llama, self.optim, self.z_loss_coefficient = llama, optim or AdamW(), z_loss_coefficient
        self.stage_layers, self.init_seed = stage_layers, init_seed
        settings = {"llama": asdict(llama), "optim": asdict(self.optim), "z_loss_coefficient": z_loss_coefficient}
        self.save_hyperparameters(settings | {"init_seed": init_seed, "init_from": init_from})

    def stage_split(self, num_stages: int) -> list[range]:
        """The layers of each stage.

        Raises:
            ConfigError: ``stage_layers`` does not fit the number of stages or of layers, or there are more stages than layers.
        """
        llama = self.llama
        if self.stage_layers is None:
            head = llama.head_flops_per_token / llama.layer_flops_per_token(llama.max_position_embeddings, causal=True)
            # The embedding multiplies nothing, but its gradient and optimizer state are as large as the head's.
            return split_layers(llama.num_hidden_layers, num_stages, first_cost=head / 4, last_cost=head)
        given = self.stage_layers
        if len(given) != num_stages or sum(given) != llama.num_hidden_layers or min(given) < 1:
            raise ConfigError(
                f"model.stage_layers={given} must name at least one layer for each of {num_stages} stages (pp x virtual_stages) "
                f"and add up to num_hidden_layers={llama.num_hidden_layers}"
            )
        ends = [sum(given[:index]) for index in range(num_stages + 1)]
        return [range(start, end) for start, end in pairwise(ends)]

    def check_layout(self, dims: ParallelDims, num_stages: int) -> None:
        """Heads against tp, layers against stages, attention against the machine, the shape against that of ``init_from``."""
        sizes = {"num_attention_heads": self.llama.num_attention_heads, "num_key_value_heads": self.llama.kv_heads}
        check_plan(self.tensor_parallel_plan, sizes, dims.tp)
        check_attention(self.llama)
        self.stage_split(num_stages)
        self._weights_to_start_from()

    @override
    def check_context_parallel(self, dims: ParallelDims, method: str) -> None:
        """Heads against ulysses, and an attention of its own against the other methods."""
        if method != "ulysses" and self.llama.attn_implementation != "sdpa":
            raise ConfigError(
                f"attn_implementation: {self.llama.attn_implementation} cannot run with cp_method: {method}, which has kernels of its own: "
                "choose attn_implementation: sdpa, or cp_method: ulysses"
            )
        sizes = {"num_attention_heads": self.llama.num_attention_heads, "num_key_value_heads": self.llama.kv_heads}
        for key, heads in sizes.items():
            if method == "ulysses" and heads // dims.tp % dims.cp:
                raise ConfigError(
                    f"{key}={heads} / tp={dims.tp} is not divisible by cp={dims.cp}, as cp_method: ulysses needs: choose another cp, or "
                    "cp_method: ring"
                )

    @override
    def apply_context_parallel(self, stage: nn.Module, context: ContextParallel) -> None:
        assert isinstance(stage, LlamaStage)
        stage.rope = rope = context.rotary(stage.rope)  # type: ignore[assignment]
        for block in stage.layers.values():
            assert isinstance(block, Block)
            block.self_attn.rope, block.self_attn.attend = rope, context.attention(block.self_attn.attend)  # type: ignore[assignment]

    @override
    def shard_sequence(self, batch: Any) -> Any:
        """This rank's tokens and labels; positions stay whole, since where a token's document begins may be another rank's to know."""
        assert self.context_parallel is not None
        return {key: value if key == "position_ids" else self.context_parallel.shard(value) for key, value in batch.items()}

    def check_data(self, datamodule: Any) -> None:
        """Whether the data's token ids are in the vocabulary."""
        if hasattr(datamodule, "check_vocabulary"):
            datamodule.check_vocabulary(self.llama.vocab_size)

    @override
    def setup(self, stage: str) -> None:
        self.check_data(self.trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = getattr(getattr(self.trainer, "datamodule", None), "tokenizer_path", None)

    @override
    def build_stage(self, index: int, num_stages: int) -> LlamaStage:
        layers = self.stage_split(num_stages)[index]
        return LlamaStage(self.llama, layers, first=index == 0, last=index == num_stages - 1, head_later=self.loss_chunks > 1)

    @override
    def init_stage(self, stage: nn.Module, device: torch.device) -> None:
        weights = self._weights_to_start_from()
        if weights is None:
            super().init_stage(stage, device)
        else:
            fill(stage, device, weights.read)

    def _weights_to_start_from(self) -> HFWeights | None:
        if self.init_from is None:
            return None
        weights = HFWeights(self.init_from)
        weights.check_agrees(self.llama, "model.init_from", "model.llama")
        return weights

    @override
    def stage_kwargs(self, microbatch: Any) -> dict[str, Any]:
        """Positions, where the batch has them: every stage attends within documents by them."""
        return {"position_ids": microbatch["position_ids"]} if "position_ids" in microbatch else {}

    @override
    def pipeline_loss(self, output: Float[Tensor, "B S E"], microbatch: Any) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        labels = microbatch["labels"]
        nll, lse = self._token_losses(output, labels)
        count = (labels != IGNORE_INDEX).sum().clamp(min=1)
        lm_loss = nll.sum() / count
        if not self.z_loss_coefficient:
            return lm_loss, {"lm_loss": lm_loss}
        z_loss = z_losses(lse, self.z_loss_coefficient).sum() / count
        return lm_loss + z_loss, {"lm_loss": lm_loss, "z_loss": z_loss}

    def _token_losses(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tp, chunks, vocabulary = self.tensor_parallel, self.loss_chunks, self.llama.vocab_size
        if chunks == 1:
            return token_losses(output, labels) if tp is None else vocab_parallel_token_losses(output, labels, vocabulary, tp)
        weight = self._last_stage.head.weight
        if tp is None:
            return chunked_token_losses(output, weight, labels, chunks)
        return vocab_parallel_chunked_losses(output, weight, labels, chunks, vocabulary, tp)

    @property
    def _last_stage(self) -> LlamaStage:
        return next(stage for stage in self.stages.values() if isinstance(stage, LlamaStage) and stage.last)

    @override
    def pipeline_output(self, output: Float[Tensor, "B S E"], microbatch: Any) -> Int[Tensor, "B S"]:
        """The most likely next token at each position, (B, S)."""
        if self.loss_chunks == 1:
            return self._most_likely(output)
        parts = output.flatten(0, 1).tensor_split(self.loss_chunks)
        return torch.cat([self._most_likely(self._last_stage.logits(part)) for part in parts]).view(output.shape[:2])

    def _most_likely(self, logits: Tensor) -> Tensor:
        if self.tensor_parallel is None:
            return logits.argmax(-1)
        return vocab_parallel_argmax(logits, self.llama.vocab_size, self.tensor_parallel)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Float[Tensor, ""]:
        loss, metrics = self.pipeline_step(batch)
        bar = self.trainer.progress_bar_callback
        # Lightning reads what is logged for the bar after every step; our ProgressBar reads it when it is shown.
        for_bar = bar is not None and not getattr(bar, "reads_when_due", False)
        for name in ("lm_loss", "z_loss"):
            if name in metrics:
                self.log(name, metrics[name], prog_bar=for_bar and name == "lm_loss")
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val_lm_loss", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test_lm_loss", batch)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Int[Tensor, "B S"]:
        return torch.cat(self.pipeline_forward(batch))

    def _evaluate(self, name: str, batch: Any) -> None:
        _, metrics = self.pipeline_step(batch)
        # Weighted by tokens, so that the epoch's mean is the mean over all its tokens; equal on all ranks, so syncing changes nothing.
        self.log(name, metrics["lm_loss"], prog_bar=True, on_epoch=True, sync_dist=True, batch_size=int(metrics["weight"]))

    @override
    def configure_optimizers(self) -> Any:
        steps = self.trainer.max_steps if self.trainer.max_steps > 0 else int(self.trainer.estimated_stepping_batches)
        named = [(global_name(name, self), parameter) for name, parameter in self.named_parameters()]
        with torch.device("meta"):
            whole = LlamaStage(self.llama, range(self.llama.num_hidden_layers), first=True, last=True)
        optimizer, scheduler = self.optim.build(named, dict(whole.named_parameters()), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
