"""Documents mixed by `prepare`: the same ones, in an order that the seed alone decides, near and far."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.prepare import prepare
from lightning_3d.data.shards import ShardWriter

DOCUMENTS = 4000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 2,000 lines, whose one token is the number of the line; two shards' worth each."""
    folder = tmp_path_factory.mktemp("corpus")
    words = {f"w{number:04d}": number for number in range(DOCUMENTS)}
    Tokenizer(models.WordLevel({**words, "?": DOCUMENTS, "end": DOCUMENTS + 1}, unk_token="?")).save(str(folder / "words.json"))
    for name, part in (("a", [*words][:2000]), ("b", [*words][2000:])):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in part))
    return folder


def documents(folder: Path) -> list[list[int]]:
    """The documents of each shard."""
    shards = Nanoset(folder, 4).shards
    assert all(shard.path.name.endswith("_shuffled.ds") for shard in shards)
    assert all((np.diff(shard.document_ends(), prepend=0) == 2).all() for shard in shards)
    assert all((shard.tokens()[1::2] == DOCUMENTS + 1).all() for shard in shards)
    return [shard.tokens()[::2].tolist() for shard in shards]


def shuffled(corpus: Path, output: Path, **settings: Any) -> list[list[int]]:
    inputs = [str(corpus / "a.jsonl"), str(corpus / "b.jsonl")]
    options: dict[str, Any] = {"eos_token": "end", "shuffle": True, "shard_nbytes": 20_000, "progress": False, **settings}
    prepare(inputs, str(corpus / "words.json"), str(output), **options)
    return documents(output)


def test_shuffle(corpus: Path, tmp_path: Path) -> None:
    shards = shuffled(corpus, tmp_path / "one", num_workers=1)
    order = [document for shard in shards for document in shard]
    assert sorted(order) == list(range(DOCUMENTS))
    assert shuffled(corpus, tmp_path / "two", num_workers=2) == shards
    other = shuffled(corpus, tmp_path / "other", seed=43)
    assert sum(a == b for a, b in zip(order, [document for shard in other for document in shard], strict=True)) < 20
    assert len(shards) == 4
    for shard in shards:  # each from all over the input, and in no order
        assert all(Counter(document // 1000 for document in shard)[part] > 50 for part in range(4))
        assert abs(np.corrcoef(shard, np.arange(len(shard)))[0, 1]) < 0.1
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert neighbours < 40


def test_held_out_are_the_same(corpus: Path, tmp_path: Path) -> None:
    inputs = [str(corpus / "a.jsonl"), str(corpus / "b.jsonl")]
    options: dict[str, Any] = {"eos_token": "end", "validation_fraction": 0.1, "progress": False}
    for name, shuffle in (("plain", False), ("mixed", True)):
        prepare(inputs, str(corpus / "words.json"), str(tmp_path / name), shuffle=shuffle, **options)
    plain = Nanoset(tmp_path / "plain/validation", 4).shards[0].tokens()[::2].tolist()
    [mixed] = documents(tmp_path / "mixed/validation")
    assert mixed != plain
    assert sorted(mixed) == plain


@pytest.mark.parametrize("order", [[0], [2, 0, 1, 3]])
def test_the_writer_writes_in_this_order(tmp_path: Path, order: list[int]) -> None:
    """Documents of different lengths, an empty one too."""
    texts = [[1, 2, 3], [], [4], [5, 6]][: len(order)]
    with ShardWriter(tmp_path / "a.ds", "tok", 2, lambda count: np.array(order)[:count]) as shard:
        for ids in texts:
            shard.append(np.array(ids, np.int64))
    expected = [texts[number] for number in order]
    assert np.fromfile(tmp_path / "a.ds", "<u2").tolist() == [token for ids in expected for token in ids]
    assert np.fromfile(tmp_path / "a.ds.index", "<u8").tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ds", "a.ds.index", "a.ds.metadata"]


def write_and_fail(path: Path, order: Any) -> None:
    with ShardWriter(path, "tok", 2, order) as shard:
        shard.append(np.array([1]))
        shard.append(np.array([2]))
        if order is None:
            raise KeyError


def fails(count: int) -> Any:
    raise KeyError(count)


@pytest.mark.parametrize("order", [None, fails])
def test_after_an_error_nothing_is_left(tmp_path: Path, order: Any) -> None:
    with pytest.raises(KeyError):
        write_and_fail(tmp_path / "a.ds", order)
    assert list(tmp_path.iterdir()) == []
