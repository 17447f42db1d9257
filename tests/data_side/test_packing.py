"""Packing and sources: every token a target once an epoch, no document twice, and going on from any place gives what follows."""

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_3d.data.text as text_module
from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.packing import Packer, Place, Row
from lightning_3d.data.text import MapStyle, Source, Streamed, open_text
from lightning_3d.data.tokenizer import load_tokenizer
from lightning_3d.errors import ConfigError

TOKENIZER = load_tokenizer(str(Path(__file__).parent.parent / "data" / "tokenizer_bpe512"))
EOS = 0
TEXTS = [f"<{number}>" + "word " * (number % 5) for number in range(120)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(text_module, "CHUNK", 8)


def map_style(texts: list[Any] = TEXTS, seed: int | None = 3) -> MapStyle:
    return MapStyle(datasets.Dataset.from_dict({"text": texts}), "text", seed)


def numbers(texts: list[str]) -> list[int]:
    return [int(text[1:].split(">")[0]) for text in texts]


def tokens_of(texts: list[str]) -> list[int]:
    return TOKENIZER.encode(texts, append_eos=True)[0].tolist()


def texts_of(source: Source, epoch: int, rank: int, replicas: int) -> list[Any]:
    return [text for texts, _, _ in source.chunks(epoch, 0, None, rank, replicas) for text in texts]


def read(source: Source, replicas: int, epoch: int = 0) -> list[list[int]]:
    """The numbers of the documents that each coord gets in an epoch."""
    return [numbers(texts_of(source, epoch, rank, replicas)) for rank in range(replicas)]


def flat(rows: list[Row]) -> list[int]:
    """The tokens of rows one after the other, each token that two rows share once."""
    return [*rows[0].tokens.tolist()[:1], *(token for row in rows for token in row.tokens[1:].tolist())]


# ---- order and split ---------------------------------------------------------------------------------------------------------


@given(total=st.integers(1, 60), replicas=st.integers(1, 5), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_documents_are_split_in_a_keyed_order(total: int, replicas: int, seed: int, epoch: int) -> None:
    """Coord r has documents r, r + dp, ... of one order, which is the same for every dp and another in every epoch."""
    source = map_style(TEXTS[:total], seed)
    (order,) = read(source, 1, epoch)
    assert sorted(order) == list(range(total))
    assert read(source, replicas, epoch) == [order[rank::replicas] for rank in range(replicas)]
    assert total < 20 or read(source, 1, epoch + 1) != [order]


def streams(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    """Streams of TEXTS of every kind that keeps its place in another way; each call opens one anew."""
    for number, part in enumerate(np.array_split(np.array(TEXTS, object), 4)):
        lines = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in part)
        (tmp_path / f"{number}.jsonl").write_text(lines)
        with gzip.open(tmp_path / f"{number}.jsonl.gz", "wt") as file:
            file.write(lines)
        table = pa.table({"text": list(part), "other": [1] * len(part)})
        pa.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)

    def generate(begins: list[int]) -> Iterator[dict[str, str]]:
        for begin in begins:
            yield from ({"text": text} for text in TEXTS[begin : begin + 40])

    def generator() -> Any:
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"begins": [0, 40, 80]})

    def of_map_style() -> Any:
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=3)

    return {
        "jsonl": lambda: datasets.load_dataset("json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=True),
        "gz": lambda: datasets.load_dataset("json", data_files=str(tmp_path / "*.gz"), split="train", streaming=True),
        "parquet": lambda: datasets.load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), split="train", streaming=True),
        "generator": generator,
        "map-style": of_map_style,
        "mapped": lambda: of_map_style().map(lambda row: {"text": row["text"] + "!"}),
        "batched": lambda: generator().map(lambda rows: {"text": [text + "!" for text in rows["text"]]}, batched=True, batch_size=9),
        "filtered": lambda: generator().filter(lambda row: not row["text"].endswith(">word ")),
        "interleaved": lambda: datasets.interleave_datasets([generator(), of_map_style()], probabilities=[0.3, 0.7], seed=5),
        "concatenated": lambda: datasets.concatenate_datasets([generator(), generator()]),
        "taken": lambda: of_map_style().skip(10).take(100),
        "shuffled": lambda: of_map_style().shuffle(seed=4, buffer_size=50),
    }


KINDS = ["jsonl", "gz", "parquet", "generator", "map-style", "mapped", "batched", "filtered", "interleaved", "concatenated", "taken"]


@pytest.mark.parametrize("kind", [*KINDS, "shuffled"])
def test_a_stream_goes_on_from_every_chunk(tmp_path: Path, kind: str) -> None:
    """Opened anew, it gives the rest, of a later epoch too, and each coord of three the documents of its own."""
    make = streams(tmp_path)[kind]
    for epoch in (0, 1):
        whole = list(Streamed(make(), "text").chunks(epoch, 0, None, 0, 1))
        order = [text for texts, _, _ in whole for text in texts]
        assert [document for _, document, _ in whole][-1] == len(order) >= 90
        for number, (_, document, state) in islice(enumerate(whole), epoch, None, 3):
            rest = Streamed(make(), "text").chunks(epoch, document, json.loads(json.dumps(state)), 0, 1)
            assert [texts for texts, _, _ in rest] == [texts for texts, _, _ in whole[number + 1 :]]
        parts = [texts_of(Streamed(make(), "text"), epoch, rank, 3) for rank in range(3)]
        assert parts == [order[rank::3] for rank in range(3)]


def test_a_stream_without_a_buffer_is_not_read_twice() -> None:
    """Its own state leads to the place: at most the chunk begun is read again."""
    read_documents: list[int] = []

    def make() -> Any:
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=30).map(note)

    def note(row: dict[str, str]) -> dict[str, str]:
        read_documents.extend(numbers([row["text"]]))
        return row

    chunks = list(islice(Streamed(make(), "text").chunks(0, 0, None, 0, 1), 6))
    assert read_documents == [0, *range(48)]  # the first one is looked at when the stream is opened
    read_documents.clear()
    next(Streamed(make(), "text").chunks(0, *chunks[-1][1:], 0, 1))
    assert read_documents == [0, *range(48, 56)]


# ---- packing -----------------------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.one_of(st.none(), st.text("ab \n", max_size=30)), min_size=1, max_size=40)


def not_empty(texts: list[str | None]) -> bool:
    return any(texts)


@given(texts=DOCUMENTS.filter(not_empty), window=st.integers(1, 20), seed=st.integers(0, 9))
def test_an_epoch_holds_every_token_once(texts: list[str | None], window: int, seed: int) -> None:
    """As one text with an end behind each document; the last row is filled up."""
    source = map_style(texts, seed)
    expected = tokens_of([text or "" for text in texts_of(source, 0, 0, 1)])
    rows = list(Packer(source, TOKENIZER, window).rows(Place(), epochs=1))
    found = flat(rows)
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {IGNORE}
    assert len(rows) == -(-(len(expected) - 1) // window)
    assert all(len(row.tokens) == len(row.positions) == window + 1 for row in rows)


@settings(max_examples=30)
@given(texts=DOCUMENTS.filter(lambda texts: all(any(texts[rank::2]) for rank in range(2))), window=st.integers(1, 20), data=st.data())
def test_rows_go_on_from_every_place(texts: list[str | None], window: int, data: st.DataObject) -> None:
    """Over several epochs, and after a detour through JSON, as in a checkpoint; nothing of one coord depends on what another does."""
    replicas = data.draw(st.integers(1, 2))
    rank = data.draw(st.integers(0, replicas - 1))
    source = map_style(texts, None)
    rows = list(islice(Packer(source, TOKENIZER, window, rank, replicas).rows(Place()), 40))
    own = tokens_of([text or "" for text in texts[rank::replicas]])
    assert flat(rows) == (own * (40 * window // len(own) + 2))[: 40 * window + 1]
    for number in data.draw(st.lists(st.integers(0, 38), min_size=3, max_size=3)):
        place = Place(**json.loads(json.dumps(vars(rows[number].after))))
        again = list(islice(Packer(source, TOKENIZER, window, rank, replicas).rows(place), 40 - number - 1))
        assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in rows[number + 1 :]]
        assert [row.after for row in again] == [row.after for row in rows[number + 1 :]]


@given(texts=DOCUMENTS.filter(not_empty), window=st.integers(1, 20))
def test_positions_restart_behind_each_end(texts: list[str | None], window: int) -> None:
    for row in Packer(map_style(texts, None), TOKENIZER, window).rows(Place(), epochs=1):
        place, expected = 0, []
        for token in row.tokens[row.tokens != IGNORE].tolist():
            expected.append(place)
            place = 0 if token == EOS else place + 1
        assert row.positions[: len(expected)].tolist() == expected


def test_a_document_of_many_windows() -> None:
    """A million tokens in one document: rows are slices of it, and the place of each is a number of tokens."""
    rows = list(Packer(map_style(["word " * 500_000]), TOKENIZER, 1000).rows(Place(), epochs=1))
    assert len(rows) == 1001
    assert [rows[number].after.tokens for number in (0, 1, 999)] == [1000, 2000, 1_000_000]


def test_no_text_for_a_coord() -> None:
    rows = Packer(map_style(["a", "", None, ""], None), TOKENIZER, 4, 1, 2).rows(Place())
    with pytest.raises(ConfigError, match="the dataset holds no text for dp coord 1 of 2: give more documents"):
        next(rows)


def test_what_is_not_text() -> None:
    def generate() -> Iterator[dict[str, Any]]:
        yield from ({"text": "a" if number < 9 else number} for number in range(20))

    source = Streamed(datasets.IterableDataset.from_generator(generate), "text")
    with pytest.raises(ConfigError, match="a document behind number 8 is int, not text"):
        list(Packer(source, TOKENIZER, 100).rows(Place(), epochs=1))


# ---- opening -----------------------------------------------------------------------------------------------------------------


def opened(dataset: Any, *, split: str = "train", streaming: bool = False, column: str = "text") -> list[Any]:
    return texts_of(open_text(dataset, None, split, streaming, column, None), 0, 0, 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_every_way_that_text_arrives(tmp_path: Path, streaming: bool) -> None:
    streams(tmp_path)
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / f"{number}.txt").write_text(text + "\n\nanother paragraph\n")
    (tmp_path / "others.json").write_text("".join(json.dumps({"n": 1, "content": text}) + "\n" for text in TEXTS))
    plain = datasets.Dataset.from_dict({"text": TEXTS})
    plain.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": plain.select(range(5)), "test": plain}).save_to_disk(tmp_path / "dict")
    assert opened(str(tmp_path / "*.jsonl"), streaming=streaming) == TEXTS
    assert opened([str(tmp_path / "[01].jsonl.gz"), str(tmp_path / "3.jsonl.gz")], streaming=streaming) == TEXTS[:60] + TEXTS[90:]
    assert opened(str(tmp_path / "*.parquet"), streaming=streaming) == TEXTS
    assert opened(str(tmp_path / "others.json"), column="content", streaming=streaming) == TEXTS
    assert opened(str(tmp_path / "*.txt"), streaming=streaming) == [text + "\n\nanother paragraph\n" for text in TEXTS[:3]]
    assert opened(str(tmp_path / "saved"), streaming=streaming) == TEXTS
    assert opened(str(tmp_path / "dict"), split="test", streaming=streaming) == TEXTS
    assert opened(plain.with_format("numpy")) == opened(plain.to_iterable_dataset().with_format("numpy")) == TEXTS


def test_a_stream_that_is_given_is_left_alone() -> None:
    """Its owner reads on, and its state is that of the owner's reading, whatever is read in between."""
    owned = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset().map(lambda row: row).filter(lambda row: True)
    theirs = iter(owned)
    assert [next(theirs)["text"] for _ in range(3)] == TEXTS[:3]
    ours = open_text(owned, None, "train", False, "text", None).chunks(0, 0, None, 0, 1)
    next(ours)
    assert [next(theirs)["text"] for _ in range(3)] == TEXTS[3:6]
    owned.load_state_dict(owned.state_dict())
    assert [row["text"] for row in islice(owned, 3)] == TEXTS[6:9]


def test_a_stream_that_breaks_off() -> None:
    def generate() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS[:20])
        raise OSError("connection\nlost")

    with pytest.raises(ConfigError, match=r"^the dataset, behind document 16, cannot be read: connection lost$"):
        opened(datasets.IterableDataset.from_generator(generate))


@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_opened(tmp_path: Path, streaming: bool) -> None:
    streams(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "broken.parquet").write_text("no")
    (tmp_path / "a.csv").write_text("no")
    (tmp_path / "folder").mkdir()
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "dict")
    for name, column, message in [
        ("nothing.jsonl", "text", r"nothing\.jsonl names no file: give \.jsonl"),
        ("*.txt", "text", r"\*\.txt names no file"),
        ("0.*", "text", r"files of several kinds: .*0\.jsonl.*0\.parquet"),
        ("a.csv", "text", r"a\.csv is none of \.jsonl, \.json, \.parquet, \.txt"),
        ("0.jsonl", "txt", r"no column 'txt': there are 'text', 'other'; name the one with the text by text_column"),
        ("0.parquet", "other", r"column 'other' holds int, not text"),
        ("empty.jsonl", "text", r"empty"),
        ("broken.jsonl", "text", r"(broken\.jsonl|the dataset) cannot be read: JSON parse error"),
        ("broken.parquet", "text", r"(broken\.parquet|the dataset) cannot be read: "),
        ("folder", "text", r"folder cannot be read: "),
        ("dict", "text", r"no split 'train': there are test"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            opened(str(tmp_path / name), column=column, streaming=streaming)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="int is not a dataset of the `datasets` library"):
        opened(3)
    with pytest.raises(ConfigError, match="the dataset is empty"):
        opened(datasets.Dataset.from_dict({"text": []}))
