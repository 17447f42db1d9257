"""Text that is packed while training: what real ranks read, how they go on from a checkpoint, and what they refuse."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks_text import SAVED, SEQUENCE, Text, fit_text

from lightning_3d.__main__ import main
from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.order import sample_ids
from lightning_3d.data.tokenizer import load_tokenizer
from lightning_3d.errors import ConfigError
from lightning_3d.testing import RankPool
from lightning_3d.text_datamodule import TextDataModule

TOKENIZER = str(Path(__file__).parent / "data" / "tokenizer_bpe512")
BACKEND = load_tokenizer(TOKENIZER).backend

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


TEXTS = [f"<{number}>" + "ab " * (number % 4) if number % 10 else "" for number in range(60)]  # some 600 tokens


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """TEXTS in three files of JSON lines and three of Parquet."""
    for part in range(3):
        rows = TEXTS[part * 20 : (part + 1) * 20]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in rows))
        pa.parquet.write_table(pa.table({"id": [1] * len(rows), "text": rows}), tmp_path / f"{part}.parquet")
    return tmp_path


def documents(seen: dict[str, Any]) -> list[str]:
    """The whole documents in the rows of a coord, in the order of training; rows overlap by a token, which is looked at, too."""
    rows = [row for batch in seen["batches"] for row in zip(batch["input_ids"], batch["labels"], strict=True)]
    assert all(inputs[1:] == labels[:-1] for inputs, labels in rows)
    assert all(before[1][-1] == after[0][0] for before, after in pairwise(rows))
    tokens = [rows[0][0][0], *(token for _, labels in rows for token in labels)]
    return BACKEND.decode(tokens, skip_special_tokens=False).split("<|endoftext|>")[:-1]


def expected(rank: int, replicas: int, epochs: int | None) -> list[str]:
    """Documents of a coord: of so many shuffled epochs of the map-style dataset, or (None) of the first one of a stream."""
    order = [sample_ids(np.arange(60) + 60 * epoch, 60, 42)[rank::replicas] for epoch in range(epochs or 0)]
    return [TEXTS[number] for number in (np.concatenate(order) if epochs else range(rank, 60, replicas)) if TEXTS[number]]


def ids(seen: dict[str, Any]) -> list[Any]:
    return [batch["input_ids"] for batch in seen["batches"]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_two_coords_share_the_documents_and_resume(files: Path, pool: RankPool, suffix: str, streaming: bool) -> None:
    """Document d is coord (d mod 2)'s, in every epoch; ten steps are five, a checkpoint, and five more, to the token."""
    data = {"dataset": str(files / f"*.{suffix}"), "tokenizer": TOKENIZER, "streaming": streaming}
    case = Text((2, 1, 1), str(files / "straight"), data)
    straight = pool.run(fit_text, 2, (case,))
    assert [(seen["coord"], seen["step"], len(seen["batches"])) for seen in straight] == [(0, 10, 10), (1, 10, 10)]
    for rank, seen in enumerate(straight):
        assert np.shape(ids(seen)) == (10, 4, SEQUENCE)
        once = expected(rank, 2, None if streaming else 1)
        found = documents(seen)
        assert len(found) > 2 * len(once)  # two epochs and more
        assert found[: len(once)] == once
        if not streaming:
            twice = expected(rank, 2, 2)
            assert found[: len(twice)] == twice

    saved = str(files / "straight" / "checkpoints" / f"step-{SAVED}")
    resumed = pool.run(fit_text, 2, (replace(case, folder=str(files / "resumed"), resume=saved),))
    assert [ids(seen) for seen in resumed] == [ids(seen)[SAVED:] for seen in straight]
    other = pool.run(fit_text, 1, (replace(case, layout=(1, 1, 1), folder=str(files / "other"), resume=saved),))[0]
    assert "dp=1: the checkpoint was trained with dp=2" in other["error"]
    assert "resume with dp=2, or train from the start on a Nanoset" in other["error"]
    assert "\n" not in other["error"]


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2)])
def test_ranks_of_a_replica_read_the_same(files: Path, pool: RankPool, layout: tuple[int, int, int]) -> None:
    """Under tp and pp, with masked documents, and validation on a set that is no multiple of the batch; as one process reads it."""
    data = {"dataset": str(files / "*.jsonl"), "tokenizer": TOKENIZER, "streaming": True, "mask_documents": True}
    data |= {"validation_dataset": str(files / "*.parquet"), "validation_samples": 6}
    case = Text(layout, str(files / "split"), data, trainer={"max_steps": 3, "val_check_interval": 2})
    first, second = pool.run(fit_text, 2, (case,))
    (alone,) = pool.run(fit_text, 1, (replace(case, layout=(1, 1, 1), folder=str(files / "alone")),))
    assert first["batches"] == second["batches"] == alone["batches"]
    assert alone["batches"][0]["position_ids"][0][:5] == list(range(5))
    assert first["validation"] == second["validation"] == pytest.approx(alone["validation"], rel=1e-4)


def test_the_global_batch_is_kept(files: Path, pool: RankPool) -> None:
    """By either number of replicas; one that cannot be is refused before any of them starts."""
    data = {"dataset": str(files / "*.jsonl"), "tokenizer": TOKENIZER, "batch_accumulation_per_replica": None, "global_batch_samples": 8}
    case = Text((2, 1, 1), str(files / "two"), data, trainer={"max_steps": 2})
    assert [np.shape(ids(seen)) for seen in pool.run(fit_text, 2, (case,))] == [(2, 4, SEQUENCE)] * 2
    (alone,) = pool.run(fit_text, 1, (replace(case, layout=(1, 1, 1), folder=str(files / "one")),))
    assert np.shape(ids(alone)) == (2, 8, SEQUENCE)
    odd = replace(case, folder=str(files / "odd"), data=data | {"global_batch_samples": 6})
    assert "data.global_batch_samples=6 is not a multiple of micro_batch_size=2 x dp=2" in pool.run(fit_text, 2, (odd,))[0]["error"]


def test_validation_that_does_not_fill_the_ranks(files: Path, pool: RankPool) -> None:
    """5 samples, 4 for the first of two coords and 1 for the second, give both one loss; 9 give the first a batch more of its own."""
    data = {"dataset": str(files / "0.jsonl"), "tokenizer": TOKENIZER, "validation_dataset": str(files / "*.parquet")}
    losses = {}
    for count in (5, 9):
        case = Text(
            (2, 1, 1), str(files / str(count)), data | {"validation_samples": count}, trainer={"max_steps": 1, "val_check_interval": 1}
        )
        first, second = pool.run(fit_text, 2, (case,))
        assert first["validation"] == second["validation"] > 0
        losses[count] = first["validation"]
    assert losses[5] != losses[9]


def test_ranks_that_do_not_read_the_same(files: Path, pool: RankPool) -> None:
    """A dataset shuffled without a common seed would give some documents twice, and leave others out."""
    case = Text((2, 1, 1), str(files / "odd"), {"tokenizer": TOKENIZER}, shuffled_by_each=True)
    for seen in pool.run(fit_text, 2, (case,)):
        assert "data.dataset: rank 0 has" in seen["error"]
        assert "and a seed to `shuffle` if you call it" in seen["error"]


# ---- one process -------------------------------------------------------------------------------------------------------------


class OneOfSeveral(SingleDeviceStrategy):
    """A single process that tells the data module it is one of several data-parallel replicas."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(torch.device("cpu"))
        self.distributed_sampler_kwargs = {"num_replicas": replicas, "rank": rank}


class Recorder(LightningModule):
    """Remembers what it saw; one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["input_ids"].tolist())
        return (self.weight - batch["input_ids"].float().mean()) ** 2

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(batch["labels"])

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        _ = self.trainer.estimated_stepping_batches  # makes Lightning build the loader before the checkpoint is restored
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    dataset: Any,
    root: Path,
    *,
    data: dict[str, Any] | None = None,
    rank: int = 0,
    replicas: int = 1,
    ckpt_path: Path | None = None,
    callbacks: list[Callback] | None = None,
    **settings: Any,
) -> Recorder:
    """Train for 10 steps with a checkpoint every 5 in root."""
    module = Recorder()
    saver = ModelCheckpoint(root, "{step}", every_n_train_steps=5, save_top_k=-1, auto_insert_metric_name=False)
    trainer = Trainer(
        strategy=OneOfSeveral(rank, replicas),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, *(callbacks or [])],
        **{"max_steps": 10, **settings},
    )
    arguments = {"sequence_length": 8, "micro_batch_size": 3, **(data or {})}
    trainer.fit(module, datamodule=TextDataModule(dataset, TOKENIZER, **arguments), ckpt_path=ckpt_path)
    return module


def map_style() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS})


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["map-style", "stream", "shuffled stream"])
def test_a_resumed_run_reads_on_where_training_stopped(tmp_path: Path, num_workers: int, kind: str) -> None:
    """A worker has read further by then; with two batches a step, mid-run, and with epochs of three batches each."""
    dataset = map_style() if kind == "map-style" else map_style().to_iterable_dataset(num_shards=4)
    dataset = dataset.shuffle(seed=3, buffer_size=16) if kind == "shuffled stream" else dataset
    data = {"num_workers": num_workers}
    for number, settings in enumerate([{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 3}]):
        straight = fit(dataset, tmp_path / f"{number}", data=data, **settings)
        resumed = fit(dataset, tmp_path / f"resumed_{number}", data=data, ckpt_path=tmp_path / f"{number}" / "5.ckpt", **settings)
        half = 5 * settings.get("accumulate_grad_batches", 1)
        assert len(straight.seen) == 2 * half
        assert len({str(batch) for batch in straight.seen}) == 2 * half
        assert resumed.seen == straight.seen[half:]
        rows = [row for batch in straight.seen for row in batch]
        once = " ".join(tokens_of([text for text in TEXTS if text] if kind == "stream" else []))
        assert " ".join(str(token) for row in rows for token in row).startswith(once[:400])


def tokens_of(texts: list[str]) -> list[str]:
    return [str(token) for text in texts for token in [*BACKEND.encode(text, add_special_tokens=False).ids, 0]]


class Interrupt(Callback):
    """Fails in the middle of a batch, with the worker already ahead of it."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("pulled the plug")


def test_resume_after_an_exception_with_another_batch_size(tmp_path: Path) -> None:
    straight = fit(map_style(), tmp_path / "straight")
    saver = ModelCheckpoint(tmp_path, "failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        fit(map_style(), tmp_path, data={"num_workers": 1}, callbacks=[Interrupt(), saver])
    resumed = fit(
        map_style(), tmp_path, data={"micro_batch_size": 1, "batch_accumulation_per_replica": 1}, ckpt_path=tmp_path / "failed.ckpt"
    )
    assert [row for batch in resumed.seen for row in batch] == [row for batch in straight.seen[7:] for row in batch][:3]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_breaks_off_while_training(tmp_path: Path, num_workers: int) -> None:
    """One line, from a worker too."""

    def generate() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS * 2)
        raise OSError("connection lost")

    dataset = datasets.IterableDataset.from_generator(generate)
    with pytest.raises(ConfigError, match=r"^the dataset, behind document 64, cannot be read: connection lost$"):
        fit(dataset, tmp_path, data={"num_workers": num_workers}, max_steps=1000)


def test_checkpoints_hold_plain_numbers(tmp_path: Path) -> None:
    """So that torch.load reads them with weights_only, and they are small however much was read."""
    fit(map_style().to_iterable_dataset(num_shards=4), tmp_path)
    state = torch.load(tmp_path / "10.ckpt", weights_only=True)["TextDataModule"]
    assert state["batches"] == 10
    assert len(json.dumps(state)) < 1500


def test_validation_is_fixed_and_leaves_training_as_it_is(tmp_path: Path) -> None:
    """20 samples for 1, 2 and 4 coords of 3 rows: as many batches for each, every target once; from the same object as training."""
    dataset = map_style().to_iterable_dataset(num_shards=4)
    alone = fit(dataset, tmp_path / "alone")
    targets = [int(token) for token in tokens_of([text for text in TEXTS if text])][1 : 20 * 8 + 1]
    for replicas in (1, 2, 4):
        data = {"validation_dataset": dataset, "validation_samples": 20}
        settings = {"val_check_interval": 3, "num_sanity_val_steps": 0}
        runs = [fit(dataset, tmp_path, data=data, rank=rank, replicas=replicas, **settings) for rank in range(replicas)]
        batches = [torch.cat(rows) for rows in zip(*(run.validated for run in runs), strict=True)]
        assert len(batches) == 3 * -(-20 // (3 * replicas))  # validated three times
        labels = torch.cat(batches[: len(batches) // 3])
        assert labels[labels != IGNORE].tolist() == targets
        if replicas == 1:
            assert runs[0].seen == alone.seen


def test_validation_set_of_less_than_a_sample(tmp_path: Path) -> None:
    short = datasets.Dataset.from_dict({"text": ["a"]})
    run = fit(map_style(), tmp_path, data={"validation_dataset": short}, max_steps=1, num_sanity_val_steps=0, val_check_interval=1)
    assert run.validated[0].tolist() == [[0] + [IGNORE] * 7] + [[IGNORE] * 8] * 2


def test_overfit_batches_repeats_them(tmp_path: Path) -> None:
    run = fit(map_style(), tmp_path, overfit_batches=2, max_steps=6)
    assert run.seen == run.seen[:2] * 3
    assert run.seen[0] != run.seen[1]


def test_loaders_draw_no_random_numbers() -> None:
    data = TextDataModule(map_style(), TOKENIZER, 8, validation_dataset=map_style())
    before = torch.get_rng_state()
    assert len(list(islice(data.train_dataloader(), 30))) == 30
    assert len(list(data.val_dataloader())) == len(data.val_dataloader()) > 30
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"data\.seed: the checkpoint was trained with 42, this run has 1: resume with the same"),
        ({"sequence_length": 9}, r"data\.sequence_length: the checkpoint was trained with 8, this run has 9"),
        ({"eos_token": "a"}, r"data\.tokenizer: the checkpoint was trained with .* with end 0, this run has .* with end \d+"),
        ({"dataset": TEXTS[1:]}, r"data\.dataset: the checkpoint was trained with .*'documents': 60.*, this run has .*'documents': 59"),
    ],
)
def test_refuses_to_resume_another_stream(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fit(map_style(), tmp_path, max_steps=5)
    dataset = datasets.Dataset.from_dict({"text": change.pop("dataset", TEXTS)})
    with pytest.raises(ConfigError, match=message):
        fit(dataset, tmp_path, data=change, ckpt_path=tmp_path / "5.ckpt")


def test_without_max_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_steps is not set: text that is packed on the fly has no known number of batches"):
        fit(map_style(), tmp_path, max_steps=-1, max_epochs=1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sequence_length": 0}, r"data\.sequence_length is 0: give a whole number of at least 1"),
        ({"micro_batch_size": 0}, r"data\.micro_batch_size is 0"),
        ({"batch_accumulation_per_replica": -1}, r"data\.batch_accumulation_per_replica is -1"),
        ({"validation_samples": 0}, r"data\.validation_samples is 0"),
        ({"num_workers": 2}, r"data\.num_workers is 2: give 0 or 1"),
        ({"sequence_length": 5000}, r"data\.sequence_length 5000 needs windows of 5001 tokens, but data\.dataset holds \d+ in all"),
        ({"dataset": "/nowhere.jsonl"}, r"data\.dataset: /nowhere\.jsonl names no file"),
        ({"text_column": "body"}, r"data\.dataset: no column 'body': there are 'text'"),
        ({"validation_dataset": "/nowhere/*.txt"}, r"data\.validation_dataset: /nowhere/\*\.txt names no file"),
        ({"validation_dataset": datasets.Dataset.from_dict({"text": [""]})}, r"data\.validation_dataset: the dataset holds no text"),
        ({"tokenizer": "/nowhere"}, r"tokenizer: /nowhere does not exist"),
        ({"eos_token": "<end>"}, r"eos_token: .* has no token '<end>'"),
    ],
)
def test_bad_settings(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextDataModule(**{"dataset": map_style(), "tokenizer": TOKENIZER, "sequence_length": 8, **keys})


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes((Path(TOKENIZER) / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"data\.eos_token: .*tokenizer\.json names no end-of-document token: name one of its tokens"):
        TextDataModule(map_style(), str(path), 8)
    assert TextDataModule(map_style(), str(path), 8, eos_token="<|endoftext|>").vocab_size == 512


def test_vocabulary() -> None:
    data = TextDataModule(map_style(), TOKENIZER, 8)
    data.check_vocabulary(512)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* has 512 ids, but the model's vocab_size is 511: it must be at least 512"):
        data.check_vocabulary(511)


def test_from_the_command_line(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    data = {"dataset": ["[01].jsonl", "2.jsonl"], "tokenizer": TOKENIZER, "sequence_length": 16, "validation_dataset": "0.parquet"}
    sizes = {"vocab_size": 512, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    config = {"data": {"class_path": "lightning_3d.TextDataModule", "init_args": data}, "model": {"llama": sizes}, "trainer": trainer}
    (files / "run.yaml").write_text(json.dumps(config))
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert main(["fit", "--config", "run.yaml", "--data.text_column", "body"]) == 2
    assert "data.dataset: no column 'body': there are 'text', 'id'" in capsys.readouterr().err
