"""Documents to rows of tokens, on the fly: tokenised, an end-of-document token behind each, cut into windows one after the other.

Windows are S + 1 tokens long and overlap by one, across documents and epochs, as a Nanoset's do: every token of a coord but its very first
is a target once an epoch. Where a window begins is a `Place`: the chunk of documents, how many documents of it are used up, how
many tokens of the next one. So nothing that was tokenised need be kept to go on from there, and a checkpoint holds a few numbers.
"""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch.utils.data import IterableDataset, get_worker_info

from lightning_3d.data.batches import Batch, as_batch
from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.text import Source
from lightning_3d.data.tokenizer import TextTokenizer
from lightning_3d.errors import ConfigError

Tokens = Int64[np.ndarray, "T"]
Window = Int64[np.ndarray, "window"]


@dataclass(frozen=True)
class Place:
    """Where a row of one coord begins, in plain numbers.

    Args:
        epoch: passes over the dataset before this one.
        document: documents of the epoch, of all coords, before the chunk in which the row begins.
        state: what the source keeps about that place.
        used: documents of this coord in the chunk, empty ones not counted, that lie before the row.
        tokens: tokens of the next document that lie before the row.
    """

    epoch: int = 0
    document: int = 0
    state: Any = None
    used: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Row:
    """A window, the place of each token in its document (from the window's beginning on), and where the next row begins."""

    tokens: Window
    positions: Window
    after: Place


@dataclass(frozen=True)
class Packer:
    """The rows of one dp coord.

    Raises:
        ConfigError: a document is not text, or a pass over the dataset holds no text for this coord.
    """

    source: Source
    tokenizer: TextTokenizer
    sequence_length: int
    rank: int = 0
    replicas: int = 1

    def rows(self, place: Place, *, epochs: int | None = None) -> Iterator[Row]:
        """Yield rows from a place on: without end, or for so many epochs, the last row then filled up with IGNORE."""
        documents = self._documents(place, epochs)
        held: deque[tuple[Tokens, Place]] = deque()
        size, offset = 0, place.tokens  # tokens held, and how many of them lie before the row
        while True:
            while size - offset <= self.sequence_length and (following := next(documents, None)) is not None:
                held.append(following)
                size += len(following[0])
            if size - offset < 2:  # the last token has been a target
                return
            tokens, positions = self._fill([ids for ids, _ in held], offset)
            offset += self.sequence_length
            while held and offset >= len(held[0][0]):
                size, offset = size - len(held[0][0]), offset - len(held[0][0])
                held.popleft()
            yield Row(tokens, positions, replace(held[0][1], tokens=offset) if held else place)

    def _fill(self, documents: list[np.ndarray], offset: int) -> tuple[Window, Window]:
        """Return a window from `offset` in the first document on, and its positions."""
        tokens = np.full(self.sequence_length + 1, IGNORE, np.int64)
        positions = np.zeros_like(tokens)
        filled = 0
        for ids in documents:
            part = ids[offset : offset + len(tokens) - filled]
            tokens[filled : filled + len(part)] = part
            positions[filled : filled + len(part)] = np.arange(len(part))
            filled, offset = filled + len(part), 0
        return tokens, positions

    def _documents(self, place: Place, epochs: int | None) -> Iterator[tuple[Tokens, Place]]:
        """Yield this coord's documents, from the one that the place is in, each with the place of its first token."""
        for epoch in islice(count(place.epoch), epochs):
            whole, found = place == Place(epoch), False
            chunk = replace(place, used=0, tokens=0)
            for texts, document, state in self.source.chunks(epoch, place.document, place.state, self.rank, self.replicas):
                for used, ids in islice(enumerate(self._encode(texts, chunk)), place.used, None):
                    found = True
                    yield ids, replace(chunk, used=used)
                chunk = place = Place(epoch, document, state)
            if whole and not found:
                raise ConfigError(f"the dataset holds no text for dp coord {self.rank} of {self.replicas}: give more documents")
            place = Place(epoch + 1)

    def _encode(self, texts: list[Any], chunk: Place) -> list[Tokens]:
        """Return the ids of each document that is not empty, with its end."""
        if odd := [text for text in texts if not isinstance(text, str | None)]:
            raise ConfigError(f"a document behind number {chunk.document} is {type(odd[0]).__name__}, not text")
        ids, lengths = self.tokenizer.encode([text or "" for text in texts], append_eos=True)
        return np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []


class PackedBatches(IterableDataset[tuple[Batch, Place]]):
    """Batches of `rows` rows from a place on, without end, each with the place behind it."""

    def __init__(self, packer: Packer, place: Place, rows: int, mask_documents: bool) -> None:
        self.packer, self.place, self.rows, self.mask_documents = packer, place, rows, mask_documents

    def __iter__(self) -> Iterator[tuple[Batch, Place]]:
        if get_worker_info() is not None:
            _after_fork()
        rows = self.packer.rows(self.place)
        while batch := list(islice(rows, self.rows)):
            yield batch_of(batch, self.mask_documents), batch[-1].after


def batch_of(rows: list[Row], mask_documents: bool) -> Batch:
    """Return rows as a batch, with position_ids where documents are masked."""
    return as_batch(np.stack([row.tokens for row in rows]), np.stack([row.positions for row in rows]) if mask_documents else None)


def _after_fork() -> None:
    """Leave threads and locks of the parent's alone, of which a forked worker has only the memory."""
    import fsspec.asyn  # type: ignore[import-untyped]

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    fsspec.asyn.reset_lock()
