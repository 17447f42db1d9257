"""Positions within documents: against a loop over tokens, by the index and by end-of-document tokens alike."""

import contextlib
import os
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_3d.data.documents import positions_from_eos
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.shards import ShardWriter
from lightning_3d.errors import ConfigError

EOS = 4


def write(folder: Path, lengths: list[list[int]], token_nbytes: int = 2) -> Path:
    """Files of documents of these lengths, each of which ends with EOS where it is not empty."""
    for number, texts in enumerate(lengths):
        with ShardWriter(folder / f"{number:05d}_unshuffled.ds", "tok", token_nbytes) as shard:
            for length in texts:
                shard.append(np.array([1] * (length - 1) + [EOS] * (length > 0)))
    return folder


LENGTHS = st.lists(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 30)), max_size=8), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 12), st.sampled_from([2, 4]), st.randoms())
def test_positions_are_those_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], sequence_length: int, token_nbytes: int, random: np.random.Generator
) -> None:
    """Empty documents and files, documents longer than a window, windows over several files, in any order and more than once."""
    expected = [position for texts in lengths for length in texts for position in range(length)]
    assume(len(expected) > sequence_length)
    nanoset = Nanoset(write(tmp_path_factory.mktemp("set"), lengths, token_nbytes), sequence_length)
    ids = [random.randrange(len(nanoset) + 2) for _ in range(20)]
    for held in (1 << 20, 0):  # starts of documents in memory, or searched for in the files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_3d.data.nanoset.HELD", held)
            positions = nanoset.positions(np.array(ids))
        assert positions.shape == (20, sequence_length + 1)
        for row, sample in zip(positions.tolist(), ids, strict=True):
            known = expected[sample * sequence_length : (sample + 1) * sequence_length + 1]
            assert row[: len(known)] == known


@given(st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5), min_size=1, max_size=6))
def test_positions_from_eos_are_those_of_a_loop(rows: list[list[int]]) -> None:
    expected = []
    for row in rows:
        positions = [0]
        for token in row[:-1]:
            positions.append(0 if token == EOS else positions[-1] + 1)
        expected.append(positions)
    assert positions_from_eos(np.array(rows), EOS).tolist() == expected


@given(LENGTHS)
def test_index_and_eos_agree(tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]]) -> None:
    """But for the first document of a window, whose beginning only the index knows."""
    total = sum(map(sum, lengths))
    assume(total > 7)
    nanoset = Nanoset(write(tmp_path_factory.mktemp("set"), lengths), 7)
    ids = np.arange((total - 1) // 7)
    by_index, by_eos = nanoset.positions(ids), positions_from_eos(nanoset.windows(ids), EOS)
    first = by_eos == np.arange(8)
    assert (by_index - by_eos == np.where(first, by_index[:, :1], 0)).all()


@pytest.mark.parametrize("held", [1 << 20, 0])
@pytest.mark.parametrize("ends", [[5, 3, 9, 12], [5, 20, 9, 12], [9, 5, 9, 12]])
def test_an_index_that_does_not_ascend(tmp_path: Path, ends: list[int], held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.data.nanoset.HELD", held)
    folder = write(tmp_path, [[4], [5, 1, 3, 3]])
    index = folder / "00001_unshuffled.ds.index"
    np.array(ends, "<u8").tofile(index)
    nanoset = Nanoset(folder, 15)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(index))} does not ascend near token .*; prepare or copy it again$"):
        nanoset.positions(np.array([0]))


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(1, 9))
def test_a_damaged_index_is_refused_or_at_least_read(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], sequence_length: int
) -> None:
    """A search cannot see all of an index: what it does not find out gives wrong positions, and never another error."""
    assume(ends != sorted(ends))
    folder = write(tmp_path_factory.mktemp("set"), [[40], [5, 20]])
    np.array([*ends, 40], "<u8").tofile(folder / "00000_unshuffled.ds.index")
    nanoset = Nanoset(folder, sequence_length)
    with pytest.raises(ConfigError, match=r"00000_unshuffled\.ds\.index does not ascend near token"):
        nanoset.positions(np.array([0]))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ConfigError):
        patch.setattr("lightning_3d.data.nanoset.HELD", 0)
        assert nanoset.positions(np.arange(len(nanoset))).shape == (len(nanoset), sequence_length + 1)


def test_an_index_of_a_billion_documents_is_not_read(tmp_path: Path) -> None:
    """All of them empty but the last three, so that the file is sparse."""
    documents, tokens = 10**9, 5_000_000
    folder = write(tmp_path, [[1]])
    path = folder / "00000_unshuffled.ds"
    os.truncate(path, 2 * tokens)
    os.truncate(f"{path}.index", 8 * documents - 24)
    with open(f"{path}.index", "ab") as file:
        np.array([2_000_000, 3_000_000, tokens], "<u8").tofile(file)
    tracemalloc.start()
    try:
        start = time.perf_counter()
        nanoset = Nanoset(folder, 1_000)
        positions = nanoset.positions(np.array([3_000, 1_999, 2_001]))
        assert time.perf_counter() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert nanoset.num_documents == documents
    assert positions[:, [0, 1, 1_000]].tolist() == [[0, 1, 1_000], [1_999_000, 1_999_001, 0], [1_000, 1_001, 2_000]]
