"""A user's module, written as a user would: a GPT-2-like model with biases, positions and a tied head, on batches that are tuples.

It knows tensor parallelism by a plan of its own, and context parallelism. Under a plain Trainer it is the reference of the tests beside it.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.loss import vocab_parallel_argmax, vocab_parallel_token_losses
from lightning_3d.parallel.plan import Row
from lightning_3d.pipeline_mixin import PipelineMixin

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 13, 8, 2, 6, 4
ROWS, BATCHES = 8, 4  # sequences in a global batch; batches in an epoch
LEARNING_RATE = 0.1

PLAN = (
    Row("wte", 0, "leave"),
    Row("wpe", 0, "leave"),
    Row("h.*.ln_[12]", None, "enter"),
    Row("h.*.attn.[qkv]", 0, "inside"),
    Row("h.*.attn.out", 1, "leave"),
    Row("h.*.fc", 0, "inside"),
    Row("h.*.proj", 1, "leave"),
    Row("ln_f", None, "enter"),
)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class Tokens(nn.Embedding):
    def attend(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Stage(nn.Module):
    def __init__(self, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first or last:
            self.wte = Tokens(VOCAB, WIDTH)  # one parameter under one name, on two stages
        if first:
            self.wpe = nn.Embedding(2 * LENGTH, WIDTH)
        self.h = nn.ModuleDict({str(layer): Block() for layer in layers})
        if last:
            self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(positions)
        for block in self.h.values():
            x = block(x)
        return self.wte.attend(self.ln_f(x)) if self.last else x


class GPT(PipelineMixin, pl.LightningModule):
    tensor_parallel_plan = PLAN

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        per_stage = LAYERS // num_stages
        return Stage(range(index * per_stage, (index + 1) * per_stage), first=index == 0, last=index == num_stages - 1)

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        """Every ``count``-th row, so that it is not the default's split."""
        return [part for i in range(count) if len((part := tuple(tensor[i::count] for tensor in batch))[0])]

    def apply_context_parallel(self, stage: nn.Module, context: ContextParallel) -> None:
        for block in stage.h.values():
            block.attn.attend = context.attention(attend)

    def stage_kwargs(self, microbatch: Any) -> dict[str, Any]:
        length, context = microbatch[0].shape[1], self.context_parallel
        places = torch.arange(length) if context is None else context.places(length * context.size)
        return {"positions": places.unsqueeze(0)}

    def pipeline_loss(self, output: Tensor, microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if self.tensor_parallel is None:
            loss = F.cross_entropy(output.flatten(0, 1), microbatch[1].flatten())
        else:
            loss = vocab_parallel_token_losses(output, microbatch[1], VOCAB, self.tensor_parallel)[0].mean()
        return loss, {"double": 2 * loss}

    def pipeline_output(self, output: Tensor, microbatch: Any) -> Tensor:
        return output.argmax(-1) if self.tensor_parallel is None else vocab_parallel_argmax(output, VOCAB, self.tensor_parallel)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, metrics = self.pipeline_step(batch)
        self.log_dict({"loss": loss, "double": metrics["double"]})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, metrics = self.pipeline_step(batch)
        self.log("val_loss", loss, batch_size=int(metrics["weight"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, metrics = self.pipeline_step(batch)
        self.log("test_loss", loss, batch_size=int(metrics["weight"]))

    def predict_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
        return self.pipeline_forward(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)


def sequences(count: int, *, seed: int = 3, length: int = LENGTH) -> TensorDataset:
    tokens = torch.randint(0, VOCAB, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def loader(trainer: Any, data: TensorDataset, rows: int = ROWS) -> DataLoader:
    """This replica's part of each global batch of ``rows`` sequences, in order (Lightning's own sampler would shuffle)."""
    place = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    return DataLoader(data, batch_size=rows // place["num_replicas"], sampler=DistributedSampler(data, shuffle=False, **place))


class Data(pl.LightningDataModule):
    """Training data of whole batches; validation data with a short last batch."""

    def __init__(self, *, rows: int = ROWS, val: int = 0, length: int = LENGTH, val_length: int = LENGTH) -> None:
        super().__init__()
        self.length = length
        self.rows, self.val, self.val_length = rows, val, val_length

    def train_dataloader(self) -> DataLoader:
        return loader(self.trainer, sequences(BATCHES * self.rows, length=self.length), self.rows)

    def val_dataloader(self) -> Any:
        return loader(self.trainer, sequences(self.val, seed=4, length=self.val_length), self.rows) if self.val else []

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()
