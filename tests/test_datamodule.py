"""Order, resume, validation and messages of the data module, through a real Trainer.

Tokens are their own positions, so that a batch names its samples.
"""

import json
import logging
import shutil
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
    keys = {
        "sequence_length": S,
        "micro_batch_size": 2,
        "batch_accumulation_per_replica": 2,
        "validation_folder": validation,
        **(data or {}),
    }
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


@pytest.mark.parametrize(("rank_sizes", "keys"), [(1, (4, 2)), (2, (2, 2)), (4, (1, 2)), (4, (2, 1))])
def test_same_stream_when_the_split_changes(folders: tuple[str, str], tmp_path: Path, rank_sizes: int, keys: tuple[int, int]) -> None:
    """A global batch of 8, begun on one replica and resumed on another number of them, with other microbatches and workers."""
    fit(folders, tmp_path / "begun", data={"micro_batch_size": 8, "batch_accumulation_per_replica": 1})
    data = {"micro_batch_size": keys[0], "batch_accumulation_per_replica": keys[1]}
    parts = [
        fit(folders, tmp_path / f"{rank}", data=data, rank=rank, replicas=rank_sizes, ckpt_path=tmp_path / "begun/5.ckpt")[0].seen
        for rank in range(rank_sizes)
    ]
    assert [[sample for part in rows for sample in part] for rows in zip(*parts, strict=True)] == expected(40, 80, 8)


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_the_global_batch_is_kept(folders: tuple[str, str], tmp_path: Path, replicas: int) -> None:
    """Begun on two replicas, resumed on others: 12 samples a batch, of the same order."""
    whole: dict[str, Any] = {"batch_accumulation_per_replica": None, "global_batch_samples": 12}
    begun, _ = fit(folders, tmp_path / "begun", data=whole, replicas=2, max_steps=5)
    assert [len(rows) for rows in begun.seen] == [6] * 5
    parts = []
    for rank in range(replicas):
        again = {"data": whole, "rank": rank, "replicas": replicas, "ckpt_path": tmp_path / "begun/5.ckpt"}
        module, trainer = fit(folders, tmp_path / f"{rank}", **again)
        assert trainer.datamodule.batch_accumulation_per_replica == 6 // replicas
        assert trainer.datamodule.global_batch_samples == 12
        parts.append(module.seen)
    assert [[sample for part in rows for sample in part] for rows in zip(*parts, strict=True)] == expected(60, 120, 12)


@pytest.mark.parametrize(
    ("samples", "replicas", "message"),
    [
        (12, 4, "is not a multiple of micro_batch_size=2 x dp=4: start processes for dp=3 or 6, or set it to 8 or 16"),
        (12, 7, "is not a multiple of micro_batch_size=2 x dp=7: start processes for dp=6, or set it to 14"),
        (13, 1, "is not a multiple of micro_batch_size=2 x dp=1: set it to 12 or 14"),
    ],
)
def test_a_global_batch_that_cannot_be_kept(folders: tuple[str, str], samples: int, replicas: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.global_batch_samples={samples} {message}$"):
        NanosetDataModule(folders[0], S, 2, global_batch_samples=samples).split_over(replicas)


def test_resume_with_another_global_batch(folders: tuple[str, str], tmp_path: Path) -> None:
    fit(folders, tmp_path / "begun", max_steps=5)
    resumed, trainer = fit(folders, tmp_path, data={"micro_batch_size": 3}, ckpt_path=tmp_path / "begun/5.ckpt")
    assert resumed.seen == expected(20, 50, 6)
    again, _ = fit(folders, tmp_path, ckpt_path=tmp_path / "10.ckpt", max_steps=12)
    assert again.seen == expected(50, 58, 4)
    assert trainer.datamodule.consumed_samples == 50


def test_another_global_batch_in_the_middle_of_a_pass(folders: tuple[str, str], tmp_path: Path) -> None:
    """Lightning counts a pass in batches: refused, and taken between two passes."""
    passes: dict[str, Any] = {"max_steps": -1, "max_epochs": 2}
    saver = ModelCheckpoint(tmp_path, "epoch-{step}", every_n_epochs=1, save_top_k=-1, auto_insert_metric_name=False)
    fit(folders, tmp_path, callbacks=[saver], **passes)
    larger: dict[str, Any] = {"data": {"micro_batch_size": 3}, **passes}
    with pytest.raises(ConfigError, match=r"^global batch of 6 samples: the checkpoint was trained with 4 and is in the middle of a pass"):
        fit(folders, tmp_path / "resumed", ckpt_path=tmp_path / "5.ckpt", **larger)
    resumed, _ = fit(folders, tmp_path / "resumed", ckpt_path=tmp_path / "epoch-13.ckpt", **larger)
    assert resumed.seen == expected(52, 100, 6)


@pytest.mark.parametrize("step", [5, 13, 15, 26])
def test_epochs_of_one_pass(folders: tuple[str, str], tmp_path: Path, step: int) -> None:
    """Two passes of 13 batches (52 of 53 samples: the one left over begins the second), resumed within and between them."""
    saver = ModelCheckpoint(tmp_path, "epoch-{step}", every_n_epochs=1, save_top_k=-1, auto_insert_metric_name=False)
    straight, trainer = fit(folders, tmp_path, callbacks=[saver], max_steps=-1, max_epochs=2)
    assert trainer.num_training_batches == 13
    assert straight.seen == expected(0, 104, 4)
    path = tmp_path / (f"{step}.ckpt" if step % 5 == 0 else f"epoch-{step}.ckpt")
    resumed, _ = fit(folders, tmp_path / "resumed", ckpt_path=path, max_steps=-1, max_epochs=2)
    assert resumed.seen == straight.seen[step:]
    assert torch.equal(resumed.weight, straight.weight) or step == 26


@pytest.mark.parametrize("settings", [{"val_check_interval": 5}, {"limit_train_batches": 3}, {"max_epochs": 4}, {"val_check_interval": 2}])
def test_resume_among_other_settings(folders: tuple[str, str], tmp_path: Path, settings: dict[str, Any]) -> None:
    straight, _ = fit(folders, tmp_path / "straight", **settings, max_steps=20)
    assert straight.seen == expected(0, 80, 4)
    for step in (5, 10, 15):
        resumed, _ = fit(folders, tmp_path / "resumed", **settings, max_steps=20, ckpt_path=tmp_path / f"straight/{step}.ckpt")
        assert resumed.seen == straight.seen[step:]
        assert torch.equal(resumed.weight, straight.weight)


def test_finished_run_is_a_no_op(folders: tuple[str, str], tmp_path: Path) -> None:
    finished, _ = fit(folders, tmp_path)
    again, trainer = fit(folders, tmp_path / "again", ckpt_path=tmp_path / "10.ckpt")
    assert again.seen == []
    assert trainer.global_step == 10
    assert torch.equal(again.weight, finished.weight)


class Interrupt(Callback):
    """Fails in the middle of a batch, with the loader's workers already ahead of it."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("pulled the plug")


def test_resume_after_an_exception(folders: tuple[str, str], tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        fit(folders, tmp_path, data={"num_workers": 2}, callbacks=[Interrupt(), saver])
    resumed, _ = fit(folders, tmp_path, ckpt_path=tmp_path / "failed.ckpt")
    assert resumed.seen == expected(28, 40, 4)


@pytest.mark.parametrize(("replicas", "num_workers"), [(1, 0), (1, 2), (2, 0), (4, 1)])
def test_validation_is_fixed_and_padded(folders: tuple[str, str], tmp_path: Path, replicas: int, num_workers: int) -> None:
    """7 samples, the last one 2 tokens short: every replica has as many batches, and every target comes once."""
    data = {"num_workers": num_workers}
    parts = [
        fit(folders, tmp_path, data=data, rank=rank, replicas=replicas, max_steps=1, num_sanity_val_steps=0)[0] for rank in range(replicas)
    ]
    batches = [torch.cat(rows) for rows in zip(*(part.validated for part in parts), strict=True)]
    assert len(batches) == -(-7 // (4 * replicas))
    labels = torch.cat(batches)
    assert labels[labels != IGNORE].tolist() == list(range(1, 7 * S + 1 - 2))
    assert all(rows.shape == (4, S) for part in parts for rows in part.validated)


def test_validation_limits(folders: tuple[str, str], tmp_path: Path) -> None:
    module, _ = fit(folders, tmp_path, limit_val_batches=1, max_steps=1, num_sanity_val_steps=0)
    assert [rows[:, 0].tolist() for rows in module.validated] == [[1, 5, 9, 13]]
    module, _ = fit(folders, tmp_path, data={"validation_samples": 5}, max_steps=1, num_sanity_val_steps=0)
    assert [rows[:, 0].tolist() for rows in module.validated] == [[1, 5, 9, 13], [17, IGNORE, IGNORE, IGNORE]]


def test_validation_leaves_training_as_it_is(folders: tuple[str, str], tmp_path: Path) -> None:
    with_it, _ = fit(folders, tmp_path, val_check_interval=2)
    without, _ = fit((folders[0], ""), tmp_path, data={"validation_folder": None})
    assert with_it.seen == without.seen
    assert torch.equal(with_it.weight, without.weight)
    assert without.validated == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_draw_no_random_numbers(folders: tuple[str, str], num_workers: int) -> None:
    data = NanosetDataModule(folders[0], S, validation_folder=folders[1], num_workers=num_workers)
    before = torch.get_rng_state()
    assert len(list(data.train_dataloader())) == SAMPLES
    assert len(list(data.val_dataloader())) == 7
    assert torch.equal(torch.get_rng_state(), before)


def test_validate_test_and_predict(folders: tuple[str, str], tmp_path: Path) -> None:
    """They read the validation set, from a checkpoint of another seed too, and leave the position alone."""
    _, trainer = fit(folders, tmp_path)
    module, data = Recorder(), NanosetDataModule(folders[0], S, validation_folder=folders[1], micro_batch_size=4, seed=7)
    trainer.validate(module, datamodule=data, ckpt_path=tmp_path / "5.ckpt", verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    assert len(module.validated) == 4
    assert torch.equal(torch.cat(trainer.predict(module, datamodule=data)), torch.cat(module.validated[:2]))
    with pytest.raises(ConfigError, match=r"data\.validation_folder is not set, but `test` needs it"):
        trainer.test(module, datamodule=NanosetDataModule(folders[0], S), verbose=False)


def test_overfit_batches_repeats_them(folders: tuple[str, str], tmp_path: Path) -> None:
    module, _ = fit(folders, tmp_path, overfit_batches=2, max_steps=-1, max_epochs=3)
    assert module.seen == expected(0, 8, 4) * 3


def test_a_second_fit(folders: tuple[str, str], tmp_path: Path) -> None:
    """The same trainer goes on; another trainer begins at the beginning, though the data module has resumed before."""
    fit(folders, tmp_path, data={"micro_batch_size": 3})  # 30 samples in 5 batches, so that counting batches of 4 would show
    data = NanosetDataModule(folders[0], S, micro_batch_size=4)
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer, module = Trainer(max_steps=10, **settings), Recorder()
    trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "5.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(module, datamodule=data)
    assert module.seen == expected(30, 58, 4)
    module = Recorder()
    Trainer(max_steps=3, **settings).fit(module, datamodule=data)
    assert module.seen == expected(0, 12, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"data\.seed: the checkpoint was trained with 42, this run has 1"),
        ({"sequence_length": 8}, r"data\.sequence_length: the checkpoint was trained with 4, this run has 8"),
        ({"swap": True}, r"data\.dataset_folder: the checkpoint was trained with .*'tokens': 213.*, this run has .*'tokens': 27"),
    ],
)
def test_refuses_to_resume_another_stream(folders: tuple[str, str], tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fit(folders, tmp_path, max_steps=5)
    swapped = folders[::-1] if change.pop("swap", False) else folders
    with pytest.raises(ConfigError, match=message):
        fit(swapped, tmp_path, data=change, ckpt_path=tmp_path / "5.ckpt")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"micro_batch_size": 0}, r"data\.micro_batch_size is 0: give a whole number of at least 1"),
        ({"batch_accumulation_per_replica": -1}, r"data\.batch_accumulation_per_replica is -1"),
        ({"sequence_length": 0}, r"data\.sequence_length is 0"),
        ({"global_batch_samples": 0}, r"data\.global_batch_samples is 0: give a whole number of at least 1"),
        (
            {"global_batch_samples": 8, "batch_accumulation_per_replica": 2},
            r"data\.global_batch_samples=8 decides batch_accumulation_per_replica, which is given too \(2\): set one of them to null",
        ),
        ({"num_workers": -1}, r"data\.num_workers is -1: give a whole number of at least 0"),
        ({"validation_samples": 0}, r"data\.validation_samples is 0"),
        ({"sequence_length": 500}, r"data\.dataset_folder: sequence_length 500 needs windows of 501 tokens, but .* holds 213 in all"),
        ({"dataset_folder": "/nowhere"}, r"data\.dataset_folder: /nowhere is not a folder"),
        ({"validation_folder": "/nowhere"}, r"data\.validation_folder: /nowhere is not a folder"),
    ],
)
def test_bad_settings(folders: tuple[str, str], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NanosetDataModule(**{"dataset_folder": folders[0], "sequence_length": S, **keys})


def test_vocabulary(folders: tuple[str, str]) -> None:
    data = NanosetDataModule(folders[0], S, validation_folder=folders[1])
    assert data.vocab_size is None  # these files do not say
    data.check_vocabulary(213)
    with pytest.raises(
        ConfigError, match=r"data\.dataset_folder: .* has token ids up to 212, but the model's vocab_size is 212: .* at least 213"
    ):
        data.check_vocabulary(212)


@pytest.mark.parametrize("key", ["dataset_folder", "validation_folder"])
def test_two_tokenizers(folders: tuple[str, str], tmp_path: Path, key: str) -> None:
    """As `prepare` notes them in nanoset.json."""
    paths = [Path(shutil.copytree(folders[0], tmp_path / name)) for name in ("a", "b", "c")]
    for path, digest in zip(paths, ("one", "one", "two"), strict=True):
        (path / "nanoset.json").write_text(json.dumps({"made_from": {"tokenizer": digest}}))
    a, b, c = map(str, paths)
    keys: dict[str, Any] = {"dataset_folder": [a, b, c]} if key == "dataset_folder" else {"dataset_folder": [a, b], "validation_folder": c}
    with pytest.raises(ConfigError, match=f"data: {a} and {c} were made by different tokenizers: prepare them with one"):
        NanosetDataModule(sequence_length=S, **keys)
    NanosetDataModule([a, b], S)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ids_past_the_first_look(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    monkeypatch.setattr("lightning_3d.datamodule.LOOK_AT_TOKENS", 90)
    data = NanosetDataModule(folders[0], S, num_workers=num_workers)
    data.check_vocabulary(100)
    with pytest.raises(ConfigError, match=r"^.*train holds token id \d+, but the model's vocab_size is 100$"):
        list(data.train_dataloader())


def test_global_batch(folders: tuple[str, str], tmp_path: Path) -> None:
    _, trainer = fit(folders, tmp_path, replicas=3)
    assert trainer.datamodule.global_batch_tokens == S * 2 * 2 * 3
    assert trainer.datamodule.consumed_samples == 10 * 12
