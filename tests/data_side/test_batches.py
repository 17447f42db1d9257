"""One stream of samples, whoever reads which part of it."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.data.batches import Batches, BatchLoader
from lightning_3d.data.blend import Blend
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.order import sample_ids
from lightning_3d.data.shards import ShardWriter
from lightning_3d.data.stream import InOrder, Stream

S = 3
SAMPLES = 41


@pytest.fixture(scope="module")
def nanoset(tmp_path_factory: pytest.TempPathFactory) -> Nanoset:
    """Token t is t."""
    folder = tmp_path_factory.mktemp("set")
    with ShardWriter(folder / "00000_unshuffled.ds", "none", 4) as shard:
        shard.append(np.arange(SAMPLES * S + 1))
    return Nanoset(folder, S)


def stream(nanoset: Nanoset, *, dp: int, rows: int, first: int, length: int, num_workers: int = 0) -> list[int]:
    """The sample ids that dp loaders give together, global batch by global batch."""
    order = Stream([nanoset], Blend([1]), [5])

    def loader(rank: int) -> BatchLoader:
        batches = Batches([order], rows=rows, rank=rank, replicas=dp)
        return BatchLoader(lambda: (batches, ((0, p) for p in count(first, batches.stride))), length, num_workers, pin_memory=False)

    loaders = map(loader, range(dp))
    return [sample for parts in zip(*loaders, strict=True) for part in parts for sample in (part["input_ids"][:, 0] // S).tolist()]


@given(st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]), st.integers(0, 500), st.integers(1, 9))
def test_any_split_reads_the_same_stream(nanoset: Nanoset, split: tuple[int, int], first: int, length: int) -> None:
    dp, rows = split
    assert (
        stream(nanoset, dp=dp, rows=rows, first=first, length=length)
        == sample_ids(np.arange(first, first + 12 * length), SAMPLES, 5).tolist()
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_reads_the_same_stream(nanoset: Nanoset, num_workers: int) -> None:
    alone, ahead = (stream(nanoset, dp=2, rows=2, first=7, length=25, num_workers=number) for number in (0, num_workers))
    assert alone == ahead
    assert sorted(alone[:SAMPLES]) != sorted(range(SAMPLES))  # an epoch does not begin at 7
    assert sorted(alone[SAMPLES - 7 : 2 * SAMPLES - 7]) == list(range(SAMPLES))


def test_labels_are_the_next_tokens(nanoset: Nanoset) -> None:
    batch = Batches([InOrder(nanoset, 6)], rows=4, rank=1, replicas=2)[0, 0]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist()[:2] == [[12, 13, 14], [15, 16, 17]]
    assert batch["labels"].tolist() == [[13, 14, 15], [16, 17, 18], [-100] * 3, [-100] * 3]
    assert batch["input_ids"].min() >= 0


@pytest.mark.parametrize("documents", ["index", 99])
def test_documents_begin_anew(tmp_path: Path, documents: str | int) -> None:
    """Documents 1 2 99 | 3 4 5 99 | 6 99: positions restart, and no label is the first of a document."""
    with ShardWriter(tmp_path / "00000_unshuffled.ds", "none", 2) as shard:
        for document in ([1, 2, 99], [3, 4, 5, 99], [6, 99]):
            shard.append(np.array(document))
    batch = Batches([InOrder(Nanoset(tmp_path, 8), 1)], rows=1, rank=0, replicas=1, documents=documents)[0, 0]
    assert batch["input_ids"].tolist() == [[1, 2, 99, 3, 4, 5, 99, 6]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[2, 99, -100, 4, 5, 99, -100, 99]]


def test_rows_of_a_blend_keep_their_places(nanoset: Nanoset, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "00000_unshuffled.ds", "none", 4) as shard:
        shard.append(np.arange(1000, 1000 + 10 * S + 1))
    order = Stream([nanoset, Nanoset(tmp_path, S)], Blend([2, 1]), [5, 6])
    sets, ids = order.place(np.arange(30))
    assert np.bincount(sets).tolist() == [20, 10]
    assert sorted(ids[sets == 1]) == list(range(10))
    rows = torch.cat([Batches([order], rows=5, rank=rank, replicas=2)[0, p]["input_ids"] for p in (0, 10, 20) for rank in (0, 1)])
    assert rows[:, 0].tolist() == (np.where(sets == 1, 1000, 0) + ids * S).tolist()


@pytest.mark.parametrize("shards", [1, 3])
def test_parts_of_sequences(shards: int, tmp_path: Path) -> None:
    """Each part is what a whole batch has at its places; of a Nanoset no other tokens are read."""
    tokens = np.arange(8 * 10 + 5)  # the last window is short
    for number, part in enumerate(np.array_split(tokens, shards)):
        with ShardWriter(tmp_path / f"{number:05d}_unshuffled.ds", "none", 4) as shard:
            shard.append(part)
    nanoset = Nanoset(tmp_path, 8)
    order = InOrder(nanoset, len(nanoset))
    whole = Batches([order], rows=len(nanoset) + 1, rank=0, replicas=1)[0, 0]
    for index, places in enumerate([[0, 1, 6, 7], [2, 3, 4, 5]]):
        part = Batches([order], rows=len(nanoset) + 1, rank=0, replicas=1, part=(index, 2))[0, 0]
        assert part["sequence_ids"].tolist() == [places] * (len(nanoset) + 1)
        for name in ("input_ids", "labels"):
            assert torch.equal(part[name], whole[name][:, places])


def test_documents_are_read_whole(nanoset: Nanoset) -> None:
    batches = Batches([InOrder(nanoset, 4)], rows=4, rank=0, replicas=1, documents=3, part=(0, 2))
    assert batches[0, 0]["position_ids"].shape == (4, S)
    assert "sequence_ids" not in batches[0, 0]
