"""A user's own script: a Llama on the text in tests/data, saved every 50 steps, going on from the newest checkpoint.

Each rank writes its process id, the loss of each step, and what it takes for the newest checkpoint in the end, to files in FOLDER.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_3d import Checkpoint, LlamaModule, NanosetDataModule, ThreeDStrategy, latest_checkpoint
from lightning_3d.model.config import LlamaConfig

DATA = Path(__file__).parent.parent / "data" / "nanoset_datatrove"


class Model(LlamaModule):
    """Fails in its third step on one rank, if told to."""

    fails_on_rank: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == self.fails_on_rank:
            raise ZeroDivisionError(f"the model of rank {self.global_rank} is broken")
        return super().training_step(batch, batch_idx)


class Diary(pl.Callback):
    """What this rank does, for whoever watches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (self.folder / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"rank-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step} {float(outputs['loss'])!r}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--fails_on_rank", type=int)
    options = parser.parse_args()
    Model.fails_on_rank = options.fails_on_rank
    checkpoints = options.folder / "checkpoints"
    on_exception = ModelCheckpoint(options.folder / "on_exception", save_on_exception=True, save_top_k=0)
    saver = Checkpoint(str(checkpoints), 50, keep_last=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThreeDStrategy(pp=2),
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[Diary(options.folder), saver, on_exception],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    llama = LlamaConfig(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    data = NanosetDataModule(str(DATA), sequence_length=16, batch_accumulation_per_replica=2, num_workers=1)
    try:
        trainer.fit(Model(llama), datamodule=data, ckpt_path=latest_checkpoint(checkpoints))
    finally:
        (options.folder / f"newest-{trainer.global_rank}").write_text(saver.last_model_path)


if __name__ == "__main__":
    main()
