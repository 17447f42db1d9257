"""Order, resume, validation and messages of the data module, through a real Trainer; tokens are their own positions, so that a batch names its samples."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.order import sample_ids
from lightning_3d.data.shards import ShardWriter
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import ConfigError

S = 4
SAMPLES = 53  # of the training set; 53 leaves a part of every batch size over

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def write(folder: Path, num_samples: int, *, less: int = 0) -> str:
    """Write a Nanoset whose token t is t, in files of odd sizes."""
    folder.mkdir(parents=True)
    tokens = np.arange(num_samples * S + 1 - less)
    for number, part in enumerate(np.array_split(tokens, 3)):
        with ShardWriter(folder / f"{number:05d}_unshuffled.ds", "none", 4) as shard:
            shard.append(part)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("data")
    return write(root / "train", SAMPLES), write(root / "validation", 7, less=2)


class OneOfSeveral(SingleDeviceStrategy):
    """A single process that tells the data module it is one of several data-parallel replicas."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(torch.device("cpu"))
        self.distributed_sampler_kwargs = {"num_replicas": replicas, "rank": rank}


class Recorder(LightningModule):
    """One weight whose gradient depends on the order of the samples; remembers which it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"][:, 0] // S
        self.seen.append(ids.tolist())
        return ((self.weight - ids.float() / SAMPLES) ** 2).mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(batch["labels"])

    test_step = validation_step

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return batch["labels"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        _ = self.trainer.estimated_stepping_batches  # makes Lightning build the loader before the checkpoint is restored
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(
    folders: tuple[str, str],
    root: Path,
    *,
    data: dict[str, Any] | None = None,
    rank: int = 0,
    replicas: int = 1,
    ckpt_path: Path | None = None,
    callbacks: list[Callback] | None = None,
    **settings: Any,
) -> tuple[Recorder, Trainer]:
    """Train with a checkpoint every 5 steps in root."""
    settings = {"max_steps": 10, **settings}
    module = Recorder()
    saver = ModelCheckpoint(root, "{step}", every_n_train_steps=5, save_top_k=-1, auto_insert_metric_name=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=OneOfSeveral(rank, replicas),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        callbacks=[saver, *(callbacks or [])],
        **settings,
    )
    train, validation = folders
    keys = {"sequence_length": S, "micro_batch_size": 2, "batch_accumulation_per_replica": 2, "validation_folder": validation, **(data or {})}
    trainer.fit(module, datamodule=NanosetDataModule(train, **keys), ckpt_path=ckpt_path)
    return module, trainer


def expected(begin: int, end: int, rows: int, *, seed: int = 42) -> list[list[int]]:
    """The samples of the stream from position begin to end, in batches."""
    return sample_ids(np.arange(begin, end), SAMPLES, seed).reshape(-1, rows).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_equals_uninterrupted(folders: tuple[str, str], tmp_path: Path, accumulate: int, num_workers: int) -> None:
    settings: dict[str, Any] = {"data": {"num_workers": num_workers}, "accumulate_grad_batches": accumulate}
    straight, _ = fit(folders, tmp_path / "straight", **settings)
    assert straight.seen == expected(0, 40 * accumulate, 4)

    short, _ = fit(folders, tmp_path / "short", **settings, max_steps=5)
    assert short.seen == straight.seen[: 5 * accumulate]
    for middle in (tmp_path / "straight" / "5.ckpt", tmp_path / "short" / "5.ckpt"):  # mid-run, and a run that ended there
        resumed, _ = fit(folders, tmp_path / "resumed", ckpt_path=middle, **settings)
        assert resumed.seen == straight.seen[5 * accumulate :]
        assert torch.equal(resumed.weight, straight.weight)
