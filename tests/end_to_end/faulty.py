"""A user's own script whose runs go wrong in their second step: ``faulty.py FOLDER raises|sleeps RANK``, on tp=2 x pp=2."""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from lightning_3d import LlamaModule, SyntheticDataModule, ThreeDStrategy
from lightning_3d.model.config import LlamaConfig

LAYER, MICROBATCH = "layers.3.mlp", 2


class Fault(callbacks.Callback):
    """In the forward of a layer in a microbatch, on one rank."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank
        self.forwards = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == self.rank:
            (layer,) = (each for name, each in module.named_modules() if name.endswith(LAYER))
            layer.register_forward_pre_hook(self.hook)

    def hook(self, *_: Any) -> None:
        self.forwards += 1
        if self.forwards == MICROBATCH + 1:
            if self.how == "raises":
                warnings.warn(f"a warning of rank {self.rank}", stacklevel=1)
                raise ZeroDivisionError("the layer is broken")
            time.sleep(1000)


def main(folder: Path, how: str, rank: int) -> None:
    llama = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
    strategy = ThreeDStrategy(tp=2, pp=2, batch_accumulation_per_replica=4, timeout_s=6, first_step_timeout_s=100)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    fault = Fault(how, rank)
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=5, callbacks=[fault], default_root_dir=folder, **off)
    data = SyntheticDataModule(llama.vocab_size, sequence_length=16, batch_accumulation_per_replica=4)
    trainer.fit(LlamaModule(llama), datamodule=data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
