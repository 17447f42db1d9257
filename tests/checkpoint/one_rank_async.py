"""One rank that saves in the background, slowly, with Lightning's ModelCheckpoint: prints what is there at each step."""

import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import LlamaModule, SyntheticDataModule, ThreeDStrategy
from lightning_3d.checkpoint import saving
from lightning_3d.checkpoint.folder import is_whole
from lightning_3d.model.config import LlamaConfig

LLAMA = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)


class Shows(Callback):
    """The whole checkpoints in a folder, before each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, *args: Any) -> None:
        print([path.name for path in self.folder.glob("step*") if is_whole(path)], flush=True)


if __name__ == "__main__":
    folder, write = Path(sys.argv[1]), saving.dcp.save
    saving.dcp.save = lambda *args, **kwargs: (time.sleep(0.3), write(*args, **kwargs))  # a slow disk
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(1, async_checkpoint=True),
        max_steps=8,
        callbacks=[saver, Shows(folder)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(LlamaModule(LLAMA), datamodule=SyntheticDataModule(64, 8))
    trainer.save_checkpoint(folder / "mine")
    print(is_whole(folder / "mine"))
