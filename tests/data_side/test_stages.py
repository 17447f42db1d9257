"""Data that takes over at a step: in one run, and resumed before, on and after the border."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_3d.data.order import GOLDEN, sample_ids
from lightning_3d.data.shards import ShardWriter
from lightning_3d.data.stages import DataStage, set_names
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import ConfigError

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

A, B = 0, 100_000  # first tokens of the sets
SWITCH = 7  # the first step on the second stage


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Token t is t, from A or B on."""
    root = tmp_path_factory.mktemp("sets")
    for name, first, count in (("a", A, 161), ("b", B, 81)):
        (root / name).mkdir()
        with ShardWriter(root / name / "00000_unshuffled.ds", "none", 4) as shard:
            shard.append(np.arange(first, first + count))
    return {name: str(root / name) for name in ("a", "b")}


class Recorder(LightningModule):
    """Remembers each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["input_ids"].tolist())
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneOfSeveral(SingleDeviceStrategy):
    """A process that says which of several data-parallel replicas it is."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(torch.device("cpu"))
        self.distributed_sampler_kwargs = {"num_replicas": replicas, "rank": rank}


def run(
    sets: dict[str, str],
    root: Path,
    ckpt: Path | None = None,
    *,
    data: dict[str, Any] | None = None,
    rank: int = 0,
    replicas: int = 1,
    **more: Any,
) -> tuple[list[list[list[int]]], NanosetDataModule]:
    """12 steps of 4 samples: of a, 4 tokens each; from step 7 on of a and b, 1 : 3, 8 tokens each."""
    later = DataStage(SWITCH, [sets["a"], sets["b"]], [1, 3], sequence_length=8)
    keys: dict[str, Any] = {"sequence_length": 4, "micro_batch_size": 4, "data_stages": [later], **(data or {})}
    module, datamodule = Recorder(), NanosetDataModule(sets["a"], **keys)
    saver = ModelCheckpoint(root, "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False)
    off: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy=OneOfSeveral(rank, replicas), callbacks=[saver], **off, **{"max_steps": 12, **more})
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt)
    return module.seen, datamodule


@pytest.mark.parametrize(("accumulate", "num_workers"), [(1, 0), (2, 2)])
def test_switches_at_its_step_and_resumes_anywhere(sets: dict[str, str], tmp_path: Path, accumulate: int, num_workers: int) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "data": {"num_workers": num_workers}}
    straight, data = run(sets, tmp_path, **settings)
    before, after = straight[: 6 * accumulate], straight[6 * accumulate :]
    firsts = [row[0] for batch in before for row in batch]
    assert firsts == (sample_ids(np.arange(24 * accumulate), 40, 42) * 4).tolist()
    assert {len(row) for batch in before for row in batch} == {4}
    rows = [row for batch in after for row in batch]
    assert {len(row) for row in rows} == {8}
    of_b = [row[0] - B for row in rows if row[0] >= B]
    assert of_b == (sample_ids(np.arange(18 * accumulate), 10, 42 + GOLDEN) * 8).tolist()
    assert [row[0] for row in rows if row[0] < B] == (sample_ids(np.arange(6 * accumulate), 20, 42) * 8).tolist()
    assert data.consumed_tokens == {"a": (24 * 4 + 6 * 8) * accumulate, "b": 18 * 8 * accumulate}
    assert data.global_batch_tokens == 4 * 8
    for step in (3, 6, 7, 9):
        resumed, again = run(sets, tmp_path / "resumed", tmp_path / f"{step}.ckpt", **settings)
        assert resumed == straight[step * accumulate :]
        assert again.consumed_tokens == data.consumed_tokens


@pytest.mark.parametrize("step", [4, 6, 8])
def test_another_dp_reads_the_same(sets: dict[str, str], tmp_path: Path, step: int) -> None:
    straight, _ = run(sets, tmp_path)
    halves = [run(sets, tmp_path / "b", tmp_path / f"{step}.ckpt", data={"micro_batch_size": 2}, rank=r, replicas=2)[0] for r in (0, 1)]
    assert [left + right for left, right in zip(*halves, strict=True)] == straight[step:]


def test_another_global_batch_moves_no_border_that_is_past(sets: dict[str, str], tmp_path: Path) -> None:
    """The second stage began at sample 24 and is resumed 8 samples later, with batches of 2."""
    straight, _ = run(sets, tmp_path)
    resumed, _ = run(sets, tmp_path / "b", tmp_path / "8.ckpt", data={"micro_batch_size": 2})
    rows = [row for batch in straight[8:] for row in batch]
    assert [row for batch in resumed for row in batch] == rows[:8]


def test_a_shared_set_goes_on(sets: dict[str, str], tmp_path: Path) -> None:
    """Samples of the same length are not read again before all have been."""
    later = DataStage(5, [sets["b"], sets["a"]], [1, 1])
    seen, _ = run(sets, tmp_path, data={"data_stages": [later]}, max_steps=16)
    firsts = [row[0] for batch in seen for row in batch if row[0] < B]
    assert firsts == (sample_ids(np.arange(len(firsts)), 40, 42) * 4).tolist()
    assert len(firsts) == 4 * 4 + 12 * 2


def test_a_stage_that_has_not_begun_may_change(sets: dict[str, str], tmp_path: Path) -> None:
    run(sets, tmp_path)
    seen, _ = run(sets, tmp_path / "b", tmp_path / "6.ckpt", data={"data_stages": [DataStage(10, sets["b"], sequence_length=8)]})
    assert [batch[0][0] >= B for batch in seen] == [False] * 3 + [True] * 3
    with pytest.raises(
        ConfigError, match=r"data\.data_stages\[0\]\.start_training_step=5: the checkpoint is at step 6 and this stage has not"
    ):
        run(sets, tmp_path / "b", tmp_path / "6.ckpt", data={"data_stages": [DataStage(5, sets["b"])]})
    with pytest.raises(
        ConfigError, match=r"data\.data_stages\[0\]\.dataset_weights: the checkpoint was trained with \['1/4', '3/4'\], this run"
    ):
        run(sets, tmp_path / "b", tmp_path / "8.ckpt", data={"data_stages": [DataStage(7, [sets["a"], sets["b"]], [1, 1], 8)]})
    with pytest.raises(ConfigError, match=r"data\.data_stages has 0 stages, but the checkpoint is in number 1"):
        run(sets, tmp_path / "b", tmp_path / "8.ckpt", data={"data_stages": []})


def test_a_folder_that_changed_is_refused(sets: dict[str, str], tmp_path: Path) -> None:
    run(sets, tmp_path)
    with ShardWriter(Path(sets["b"]) / "00001_unshuffled.ds", "none", 4) as shard:
        shard.append(np.arange(5))
    try:
        assert len(run(sets, tmp_path / "b", tmp_path / "6.ckpt")[0]) == 6  # not begun yet
        with pytest.raises(
            ConfigError, match=r"data_stages\[0\]\.dataset_folder: the checkpoint was trained with .*'tokens': 81.*'tokens': 86"
        ):
            run(sets, tmp_path / "b", tmp_path / "7.ckpt")
    finally:
        for path in Path(sets["b"]).glob("00001*"):
            path.unlink()


@pytest.mark.parametrize(
    ("max_epochs", "refused"), [(0.5, r"data\.max_epochs=0\.5: this run would read .*a 0\.60 times: train for fewer steps"), (0.6, None)]
)
def test_max_epochs(sets: dict[str, str], tmp_path: Path, max_epochs: float, refused: str | None) -> None:
    """24 of 40 samples."""
    settings: dict[str, Any] = {"data": {"max_epochs": max_epochs, "data_stages": []}, "max_steps": 6}
    if refused is None:
        assert len(run(sets, tmp_path, **settings)[0]) == 6
        return
    with pytest.raises(ConfigError, match=refused):
        run(sets, tmp_path, **settings)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_weights": [1.0, 2.0]}, r"data\.dataset_weights has 2 values for 1 folders: give one for each"),
        ({"dataset_weights": [0.0]}, r"data\.dataset_weights=\[0\.0\]: give numbers of at least 0"),
        ({"dataset_weights": []}, r"data\.dataset_weights has 0 values for 1 folders"),
        ({"max_epochs": [1, 2]}, r"data\.max_epochs has 2 values for 1 folders"),
        ({"dataset_folder": []}, r"data\.dataset_folder=\[\]: name at least one folder"),
        ({"twice": True}, r"data\.dataset_folder=\[.*\]: name at least one folder, and each only once"),
        ({"data_stages": [DataStage(1, "a")]}, r"data\.data_stages\[0\]\.start_training_step=1 is not after 1, where the stage before"),
        ({"data_stages": [DataStage(5, "/nowhere")]}, r"data\.data_stages\[0\]\.dataset_folder: /nowhere is not a folder"),
        ({"data_stages": [DataStage(5, "a", sequence_length=0)]}, r"data\.data_stages\[0\]\.sequence_length is 0"),
    ],
)
def test_bad_settings(sets: dict[str, str], keys: dict[str, Any], message: str) -> None:
    if keys.pop("twice", False):
        keys = {"dataset_folder": [sets["a"], sets["a"]]}
    stages = [
        DataStage(s.start_training_step, sets.get(str(s.dataset_folder), s.dataset_folder), sequence_length=s.sequence_length)
        for s in keys.pop("data_stages", [])
    ]
    with pytest.raises(ConfigError, match=message):
        NanosetDataModule(**{"dataset_folder": sets["a"], "sequence_length": 4, **keys}, data_stages=stages)


def test_names_for_logs() -> None:
    assert set_names(["/data/web/train", "/data/code/train"]) == ["web", "code"]
    assert set_names(["/x/web/train", "/y/web/train", "books"]) == ["x/web", "y/web", "books"]
