"""Validation and predict of a small Llama whose loss is computed in chunks, on each rank."""

from typing import Any

import torch
from ranks_fit import Case, trainer_for
from scenario import quiet
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule


def evaluate(case: Case, chunks: int, tied: bool) -> tuple[float, Tensor]:
    """The validation loss and the most likely tokens; the vocabulary of 61 is not divisible by tp, nor the tokens by the chunks."""
    quiet()
    torch.set_default_dtype(torch.float64)
    config = LlamaConfig(61, 32, 48, 4, 4, 2, max_position_embeddings=16, tie_word_embeddings=tied, initializer_range=0.2)
    ids = torch.randint(0, 61, (8, 15), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    trainer, module = trainer_for(case), LlamaModule(config, loss_chunks=chunks)
    data: Any = DataLoader([batch], batch_size=None)
    metrics = trainer.validate(module, data, verbose=False)[0]
    return metrics["val_lm_loss"], torch.cat(trainer.predict(module, data))
