"""One rank that saves every two steps to FOLDER, on a disk that somebody fills before step 4, nearly fills before 6, and clears then."""

import shutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_3d import Checkpoint, LlamaModule, SyntheticDataModule, ThreeDStrategy
from lightning_3d.model.config import LlamaConfig

LLAMA = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
PAGE = 4096


class Somebody(Callback):
    """Leaves as much room as is named for a step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder.parent / "somebody"

    def on_train_batch_start(self, *args: Any) -> None:
        step = args[0].global_step
        self.file.unlink(missing_ok=True)
        shards = self.folder / "step-2" / "__0_0.distcp"
        left = {3: 0, 5: shards.stat().st_size + PAGE if shards.exists() else 0}.get(step)
        if left is not None:
            self.file.write_bytes(bytes((shutil.disk_usage(self.folder).free - left) // PAGE * PAGE))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(1),
        max_steps=8,
        callbacks=[Checkpoint(str(folder), 2), Somebody(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LlamaModule(LLAMA), datamodule=SyntheticDataModule(64, 8))
