"""Packed rows through LlamaModule: a fit, a validation and predictions on each rank, in float64."""

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from plain_llama import logits
from ranks_fit import Case, Record, full, trainer_for
from ranks_gpt import loader
from scenario import Scenario, quiet
from torch import Tensor

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule

SEQUENCE, ROWS, STEPS = 16, 4, 2  # a global batch has ROWS sequences
MODEL = Scenario().model | {"num_hidden_layers": 5}
Row = dict[str, Tensor]


def rows(count: int, seed: int = 5) -> list[Row]:
    """Rows of documents of 1 to 9 tokens; the first token of a document is nobody's target."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        lengths = torch.randint(1, 10, (SEQUENCE + 1,), generator=generator).tolist()
        positions = torch.cat([torch.arange(length) for length in lengths])[: SEQUENCE + 1]
        tokens = torch.randint(0, MODEL["vocab_size"], (SEQUENCE + 1,), generator=generator)
        labels = tokens[1:].masked_fill(positions[1:] == 0, -100)
        out.append({"input_ids": tokens[:-1], "labels": labels, "position_ids": positions[:-1]})
    return out


class Rows(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(self.trainer, rows(STEPS * ROWS), ROWS)

    def val_dataloader(self) -> Any:
        return loader(self.trainer, rows(ROWS, seed=6), ROWS)

    predict_dataloader = val_dataloader


class Llama(LlamaModule):
    def __init__(self) -> None:
        super().__init__(LlamaConfig(**MODEL))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_step(batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class RecordStart(Record):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen["start"] = full(dict(module.named_parameters()))


def fit_packed(case: Case) -> dict[str, Any]:
    quiet()
    torch.set_default_dtype(torch.float64)
    record = RecordStart()
    trainer, module = trainer_for(case, record), Llama()
    trainer.fit(module, datamodule=Rows())
    seen = {"weights": full(dict(module.named_parameters())), "val_lm_loss": float(trainer.callback_metrics["val_lm_loss"])}
    predicted = trainer.predict(module, datamodule=Rows())
    return record.seen | seen | {"step": trainer.global_step, "predicted": torch.cat(predicted)}


def loss_document_by_document(weights: dict[str, Tensor], batch: list[Row]) -> Tensor:
    """The loss of a batch as a plain Llama computes it that never sees two documents at once."""
    losses, count = [], 0
    for row in batch:
        begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), SEQUENCE]
        for begin, end in pairwise(begins):
            labels = row["labels"][begin:end]
            scores = logits(weights, MODEL, row["input_ids"][None, begin:end])[0]
            losses.append(torch.nn.functional.cross_entropy(scores, labels, reduction="sum", ignore_index=-100))
            count += int((labels != -100).sum())
    return torch.stack(losses).sum() / count
