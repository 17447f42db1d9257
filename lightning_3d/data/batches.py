"""Batch after batch for one data-parallel coord: the only place where the order, the windows and the split over dp meet.

The global batch that begins at position p holds positions [p, p + G) of the stream, G = rows x dp, and coord r takes the
contiguous part r. So the stream is one list of samples; dp, accumulation and workers only decide who reads which part of it,
and one integer, the position, is all there is to resume.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.order import sample_ids
from lightning_3d.data.workers import outlive_sigterm
from lightning_3d.errors import ConfigError

Batch = dict[str, Int64[Tensor, "n S"]]


class Batches(Dataset[Batch]):
    """Position of a global batch -> this coord's rows of it, shuffled by `seed`, or in order where seed is None.

    In order, positions at and past `num_samples` give rows without targets, so that every coord has the same number of batches.
    """

    def __init__(self, nanoset: Nanoset, *, rows: int, rank: int, seed: int | None, num_samples: int, vocab_size: int | None) -> None:
        self.nanoset = nanoset
        self.rows = rows
        self.rank = rank
        self.seed = seed
        self.num_samples = num_samples
        self.vocab_size = vocab_size

    def __getitem__(self, position: int) -> Batch:
        positions = position + self.rank * self.rows + np.arange(self.rows, dtype=np.int64)
        if self.seed is None:
            ids = np.where(positions < self.num_samples, positions, len(self.nanoset))
        else:
            ids = sample_ids(positions, self.num_samples, self.seed)
        windows = self.nanoset.windows(ids)
        if self.vocab_size is not None and (largest := int(windows.max())) >= self.vocab_size:
            raise ConfigError(f"{self.nanoset.folder} holds token id {largest}, but the model's vocab_size is {self.vocab_size}")
        tokens = torch.from_numpy(windows)
        return {"input_ids": tokens[:, :-1].clamp(min=0), "labels": tokens[:, 1:].contiguous()}


class BatchLoader:
    """An iterable over `length` batches from the position that `first()` gives when the first batch is asked for.

    It is not a DataLoader but makes one for each pass: Lightning replaces a DataLoader's sampler by a shuffled one and seeds its workers
    by the global rank, and leaves any other iterable alone. The DataLoader has its own generator, so that iterating draws
    nothing from the global one. `state_dict` tells Lightning that the loader can be resumed; the position itself is kept by whoever
    gives `first`.
    """

    def __init__(self, batches: Batches, first: Callable[[], int], length: int, stride: int, num_workers: int, pin_memory: bool) -> None:
        self.batches = batches
        self.first = first
        self.length = length
        self.stride = stride
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        begin = self.first()
        yield from DataLoader(
            self.batches,
            batch_size=None,
            sampler=range(begin, begin + self.length * self.stride, self.stride),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=outlive_sigterm,
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, int]:
        """Return nothing: the position is kept once, by the data module."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the position is asked for when iteration begins."""
