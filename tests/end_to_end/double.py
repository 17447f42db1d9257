"""For recipes that name `double.Diary`: computes in float64."""

import time
from pathlib import Path
from typing import Any

import torch
import user_script

torch.set_default_dtype(torch.float64)


class Diary(user_script.Diary):
    """Notes the loss of each step in FOLDER/rank-R, and then waits, so that a test can meet the run on its way."""

    def __init__(self, folder: str, pause_s: float) -> None:
        super().__init__(Path(folder))
        self.pause_s = pause_s

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        time.sleep(self.pause_s)
