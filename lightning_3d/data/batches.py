"""Batch after batch for one data-parallel coord: the only place where the stream, the windows and the split over dp meet.

The global batch that begins at position p holds positions [p, p + G) of the stream, G = rows x dp, and coord r takes the
contiguous part r. So the stream is one list of samples; dp, accumulation and workers only decide who reads which part of it,
and one integer, the position, is all there is to resume.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_3d.data.documents import positions_from_eos
from lightning_3d.data.nanoset import IGNORE, Nanoset
from lightning_3d.data.stream import InOrder, Samples, Stream
from lightning_3d.data.workers import outlive_sigterm, short_errors
from lightning_3d.errors import ConfigError
from lightning_3d.placement import SEQUENCE_IDS, head_tail

Batch = dict[str, Int64[Tensor, "n S"]]
Key = tuple[int, int]  # (number of the stream, position in it)
AHEAD = 4096  # samples whose place is worked out at once: numpy's calls cost 100 us, whether for 4 samples or for thousands


class Batches(Dataset[Batch]):
    """(Stream, position of a global batch) -> this coord's rows of it.

    Args:
        streams: what the positions are in; a run with data stages has several.
        rows: samples of this coord's batch.
        rank: the coord on dp.
        replicas: how many coords there are.
        vocab_size: of the model, to refuse ids beyond it; None leaves that out.
        documents: where documents end, for attention within them: by the "index", or behind each token of this id; None masks nothing.
        part: (index, number) of the part of each sequence to read, as context parallelism cuts them; with documents all is read,
            since where a token's document begins may be in another part.
    """

    def __init__(
        self,
        streams: Sequence[Stream | InOrder],
        *,
        rows: int,
        rank: int,
        replicas: int,
        vocab_size: int | None = None,
        documents: str | int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.streams = list(streams)
        self.rows = rows
        self.rank = rank
        self.replicas = replicas
        self.vocab_size = vocab_size
        self.documents = documents
        self.part = part
        self._block: tuple[Key, tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def stride(self) -> int:
        """Samples of a global batch."""
        return self.rows * self.replicas

    def __getitem__(self, key: Key) -> Batch:
        sets, ids = self.place(key)
        stream = self.streams[key[0]]
        if self.part[1] > 1 and self.documents is None:
            return self._part(stream, sets, ids)
        windows = np.empty((self.rows, stream.sets[0].sequence_length + 1), np.int64)
        positions = np.empty_like(windows) if self.documents == "index" else None
        for number, members in enumerate(stream.sets):
            mine = np.flatnonzero(sets == number)
            if not len(mine):
                continue
            windows[mine] = self._checked(members, members.windows(ids[mine]))
            if positions is not None:
                positions[mine] = members.positions(ids[mine])
        if isinstance(self.documents, int):
            positions = positions_from_eos(windows, self.documents)
        return as_batch(windows, positions)

    def _part(self, stream: Stream | InOrder, sets: np.ndarray, ids: np.ndarray) -> Batch:
        """One rank's part of each sequence: two chunks, each with the token behind it, its last label."""
        length = stream.sets[0].sequence_length
        index, number = self.part
        chunks = head_tail(length, number, index)
        windows = np.empty((self.rows, 2, length // number // 2 + 1), np.int64)
        for member, members in enumerate(stream.sets):
            mine = np.flatnonzero(sets == member)
            if len(mine):
                parts = [_span(members, ids[mine], start, end + 1) for start, end in chunks]
                windows[mine] = self._checked(members, np.concatenate(parts, 1)).reshape(len(mine), 2, -1)
        batch = as_batch(windows.reshape(2 * self.rows, -1), None)
        places = torch.cat([torch.arange(*chunk) for chunk in chunks]).expand(self.rows, -1)
        return {name: tensor.reshape(self.rows, -1) for name, tensor in batch.items()} | {SEQUENCE_IDS: places.contiguous()}

    def place(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """The set and the sample's id of each of this coord's rows, from a block of batches that is worked out once."""
        number, position = key
        batches = max(1, AHEAD // self.rows)
        batch, shift = divmod(position, self.stride)
        block, batch = divmod(batch, batches)
        if self._block is None or self._block[0] != (number, block * self.stride + shift):
            begins = (block * batches + np.arange(batches, dtype=np.int64)) * self.stride + shift + self.rank * self.rows
            places = self.streams[number].place((begins[:, None] + np.arange(self.rows)).ravel())
            self._block = (number, block * self.stride + shift), places
        rows = slice(batch * self.rows, (batch + 1) * self.rows)
        sets, ids = self._block[1]
        return sets[rows], ids[rows]

    def _checked(self, members: object, windows: Int64[np.ndarray, "n window"]) -> Int64[np.ndarray, "n window"]:
        if self.vocab_size is not None and (largest := int(windows.max())) >= self.vocab_size:
            raise ConfigError(
                f"{getattr(members, 'folder', members)} holds token id {largest}, but the model's vocab_size is {self.vocab_size}"
            )
        return windows


def _span(members: Samples, ids: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Tokens `start` to `stop` of windows, without reading the others where the set can."""
    return members.spans(ids, start, stop) if isinstance(members, Nanoset) else members.windows(ids)[:, start:stop]


def as_batch(windows: Int64[np.ndarray, "n window"], positions: Int64[np.ndarray, "n window"] | None) -> Batch:
    """Inputs, and the next tokens as labels; with positions in documents those too, and no label that is the first of a document."""
    tokens = torch.from_numpy(windows)
    batch = {"input_ids": tokens[:, :-1].clamp(min=0), "labels": tokens[:, 1:].contiguous()}
    if positions is not None:
        batch["position_ids"] = torch.from_numpy(positions[:, :-1].copy())
        batch["labels"][torch.from_numpy(positions[:, 1:] == 0)] = IGNORE
    return batch


class BatchLoader:
    """An iterable over `length` batches, of which `begin()` tells the keys when the first one is asked for.

    It is not a DataLoader but makes one for each pass: Lightning replaces a DataLoader's sampler by a shuffled one and seeds its workers
    by the global rank, and leaves any other iterable alone. The DataLoader has its own generator, so that iterating draws
    nothing from the global one. `state_dict` tells Lightning that the loader can be resumed; the position itself is kept by whoever
    gives `begin`.
    """

    def __init__(self, begin: Callable[[], tuple[Batches, Iterator[Key]]], length: int, num_workers: int, pin_memory: bool) -> None:
        self.begin = begin
        self.length = length
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        batches, keys = self.begin()
        loader: DataLoader[Batch] = DataLoader(
            batches,
            batch_size=None,
            sampler=_Keys(keys, self.length),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=outlive_sigterm,
            generator=torch.Generator(),
        )
        yield from short_errors(loader)

    def state_dict(self) -> dict[str, int]:
        """Return nothing: the position is kept once, by the data module."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the position is asked for when iteration begins."""


class _Keys:
    """So many keys of an endless iterator, as the sampler that a DataLoader wants."""

    def __init__(self, keys: Iterator[Key], length: int) -> None:
        self.keys = keys
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Key]:
        return (key for _, key in zip(range(self.length), self.keys, strict=False))
