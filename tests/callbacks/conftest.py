"""A module whose loss, gradients and learning rates can be worked out by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

ROWS, SEQUENCE = 2, 8


class Line(LightningModule):
    """y = w x with w = 1 and x = 1, ..., trained towards 0: the gradient of 0.5 * w**2 is w."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = 0.5 * (self.w**2).sum()
        self.log("lm_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_lm_loss", 0.5 * (self.w**2).sum(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}]


class Recorder(Callback):
    """Keeps what was logged after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader([{"input_ids": torch.arange(SEQUENCE)} for _ in range(ROWS * batches)], batch_size=ROWS)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., tuple[Trainer, Recorder]]:
    def run(*callbacks: Callback, model: LightningModule | None = None, batches: int = 4, **kwargs: Any) -> tuple[Trainer, Recorder]:
        recorder = Recorder()
        options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "logger": False, "enable_checkpointing": False} | kwargs
        ckpt_path = options.pop("ckpt_path", None)
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=tmp_path,
            enable_progress_bar=any("ProgressBar" in type(c).__name__ for c in callbacks),
            enable_model_summary=any("Summary" in type(c).__name__ for c in callbacks),
            callbacks=[*callbacks, recorder],
            **options,
        )
        trainer.fit(model or Line(), loader(batches), loader(2), ckpt_path=ckpt_path)
        return trainer, recorder

    return run
