"""Gradients of one step of a small Llama in bfloat16: in one process, in a plain loop, and in a layout."""

from typing import Any

import lightning.pytorch as pl
import torch
from ranks_fit import Case, full, trainer_for
from ranks_precision import CONFIG
from scenario import Replica, quiet
from torch import Tensor

from lightning_3d.model.llama import LlamaStage
from lightning_3d.model.loss import token_losses
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.seeding import materialise

ROWS, MICRO = 8, 2  # sequences in the global batch, and in each microbatch of any layout


def global_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, 17), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[:3, 5:] = -100  # so that replicas and microbatches weigh differently
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


def plain(mixed: bool) -> dict[str, Tensor]:
    """Weights, gradients and their sums in float32, products in bfloat16; or all in bfloat16."""
    model = LlamaStage(CONFIG, range(CONFIG.num_hidden_layers), first=True, last=True)
    materialise(model, 42, torch.device("cpu"))
    model.to(torch.float32 if mixed else torch.bfloat16)
    batch = global_batch()
    tokens = (batch["labels"] != -100).sum()
    for ids, labels in zip(batch["input_ids"].split(MICRO), batch["labels"].split(MICRO), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            nll = token_losses(model(ids), labels)[0]
        (nll.sum() / tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients(case: Case) -> dict[str, Tensor]:
    quiet()
    seen: dict[str, Tensor] = {}

    class Record(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.update(full({name: parameter.grad for name, parameter in module.named_parameters()}))

    assert case.layout is not None
    rows = ROWS // case.layout[0]
    trainer = trainer_for(
        Case(case.layout, strategy={"batch_accumulation_per_replica": rows // MICRO, **case.strategy}, trainer=case.trainer), Record()
    )
    trainer.fit(LlamaModule(CONFIG, AdamW(learning_rate=1e-3)), Replica(trainer.strategy, [global_batch()], rows))
    return seen
