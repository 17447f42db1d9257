"""A run on a rank that saves after each step, in a background thread that is late: what was written, and what should have been."""

import time
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from scenario import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.checkpoint import Saver, restore
from lightning_3d.strategy import ThreeDStrategy

LATE_S = 0.1
STEPS = 4


def be_late(saver: Saver) -> None:
    """Copying begins when whoever does not wait for it is done."""
    assert saver._thread is not None
    saver._thread.submit(time.sleep, LATE_S)


class Late(pl.Callback):
    """For callbacks that save after this one."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        be_late(trainer.strategy.saver)


class Net(pl.LightningModule):
    """Its forward writes to buffers, a hook to weights; one optimizer, or two that are stepped by hand."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.net(batch[0]).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()
        return None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> Any:
        parts = [self.parameters()] if self.automatic_optimization else [self.net[0].parameters(), self.net[1:].parameters()]
        return [torch.optim.AdamW(part, 0.1) for part in parts]


class SaveAll(pl.Callback):
    """Saves after each step, and notes the state; after the third it goes back to the second."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.noted: dict[str, list[Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        path = f"{self.folder}/step-{batch_idx}"
        self.noted[path] = tensors(module, trainer.optimizers)
        trainer.strategy.saver.wait()
        be_late(trainer.strategy.saver)
        trainer.save_checkpoint(path)
        if len(self.noted) == 3:
            trainer.strategy.load_checkpoint(list(self.noted)[1])


def tensors(module: nn.Module, optimizers: list[Any]) -> list[Tensor]:
    """Copies of all that a checkpoint holds."""
    moments = chain.from_iterable(values.values() for optimizer in optimizers for values in optimizer.state.values())
    return [value.clone() for value in chain(module.state_dict().values(), moments)]


def differences(folder: str, manual: bool, accumulate: int) -> dict[str, list[int]]:
    """For each checkpoint which of its tensors are not those of its step; of a plain module in one process."""
    quiet()
    saves = SaveAll(folder)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ThreeDStrategy(1, async_checkpoint=True),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[saves],
        **off,
    )
    rows = torch.randn(STEPS * accumulate * 4, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Net(manual=manual), DataLoader(TensorDataset(rows), 4))
    found = {}
    for path, wanted in saves.noted.items():
        loaded = Net(manual=manual)
        optimizers = loaded.configure_optimizers()
        restore(path, loaded, optimizers)
        pairs = zip(tensors(loaded, optimizers), wanted, strict=True)
        found[path] = [index for index, (is_there, was) in enumerate(pairs) if not torch.equal(is_there, was)]
    return found
