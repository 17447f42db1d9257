"""One stream of samples, whoever reads which part of it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.data.batches import Batches, BatchLoader
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.order import sample_ids
from lightning_3d.data.shards import ShardWriter

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
    loaders = [
        BatchLoader(
            Batches(nanoset, rows=rows, rank=rank, seed=5, num_samples=len(nanoset), vocab_size=None),
            lambda: first,
            length=length,
            stride=rows * dp,
            num_workers=num_workers,
            pin_memory=False,
        )
        for rank in range(dp)
    ]
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
    batch = Batches(nanoset, rows=4, rank=1, seed=None, num_samples=6, vocab_size=None)[0]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist()[:2] == [[12, 13, 14], [15, 16, 17]]
    assert batch["labels"].tolist() == [[13, 14, 15], [16, 17, 18], [-100] * 3, [-100] * 3]
    assert batch["input_ids"].min() >= 0
