"""What Trainer(precision=...) changes on each rank, for a small Llama in float32."""

from typing import Any

import torch
from ranks_fit import Case, trainer_for
from scenario import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
)


class Watched(LlamaModule):
    """Notes the dtypes of what its stages take, give and lose."""

    def __init__(self) -> None:
        super().__init__(CONFIG, AdamW(learning_rate=1e-2), z_loss_coefficient=1e-3)
        self.dtypes: dict[str, set[str]] = {}

    def note(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            self.dtypes.setdefault(what, set()).add(str(value.dtype).removeprefix("torch."))

    def configure_model(self) -> None:
        super().configure_model()
        for stage in self.stages.values():
            stage.register_forward_hook(self._exchanged)
            for block in stage.layers.values():
                block.mlp.up_proj.register_forward_hook(lambda module, args, output: self.note("product", output))

    def _exchanged(self, stage: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not stage.first:
            self.note("received", args[0])
        if not stage.last:
            self.note("sent", output)

    def pipeline_loss(self, output: Tensor, microbatch: Any) -> Any:
        loss, metrics = super().pipeline_loss(output, microbatch)
        self.note("microbatch loss", loss)
        return loss, metrics

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            self.note("parameter", parameter)
            self.note("gradient", parameter.grad)


def fit(case: Case) -> tuple[dict[str, set[str]], list[float], float]:
    """The dtypes, the losses of six steps on one batch, and the last gradient norm."""
    quiet()
    losses: list[float] = []

    class Module(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    ids = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}] * 6
    trainer, module = trainer_for(case), Module()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.dtypes, losses, float(getattr(trainer.strategy, "last_grad_norm", 0.0))
