"""One shard of a Nanoset: the bytes that datatrove and Nanotron read and write, in both directions.

    00000_unshuffled.ds           token ids back to back, little-endian uint16 or uint32; no header, no padding
    00000_unshuffled.ds.index     uint64: where each document ends, in tokens
    00000_unshuffled.ds.metadata  "tokenizer|bytes per token", tokens, tokens for people ("35.2 kT"); no newline at the end

The metadata is written last: a shard that has it is whole. Opening a shard reads 8 bytes of the index, whatever its size.
"""

import mmap
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from lightning_3d.errors import ConfigError

WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def token_nbytes_for(vocab_size: int) -> int:
    """Return the bytes per token that a vocabulary needs: 2 up to 65,536 ids, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


@dataclass(frozen=True)
class Shard:
    """A shard on disk, checked for completeness; its tokens are read through a memory map."""

    path: Path
    num_tokens: int
    num_documents: int
    token_nbytes: int
    tokenizer: str

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Open `<name>.ds` with the index and metadata beside it.

        Raises:
            ConfigError: a file is missing, the metadata is of another format, or the sizes contradict each other.
        """
        tokenizer, token_nbytes = _read_metadata(path)
        index = path.with_name(path.name + ".index")
        if not index.is_file():
            raise ConfigError(f"{index} is missing: {path.name} is not a whole Nanoset file; prepare or copy it again")
        if index.stat().st_size % 8:
            raise ConfigError(f"{index} has {index.stat().st_size} bytes, not a multiple of 8: it is truncated; prepare or copy it again")
        num_documents = index.stat().st_size // 8
        end = np.fromfile(index, "<u8", offset=index.stat().st_size - 8) if num_documents else [0]
        num_tokens = int(end[0])
        if num_tokens * token_nbytes != (nbytes := path.stat().st_size):
            raise ConfigError(
                f"{path} has {nbytes} bytes, but its index ends at {num_tokens} tokens of {token_nbytes} bytes "
                f"= {num_tokens * token_nbytes} bytes: one of them is truncated or of another file; prepare or copy it again"
            )
        return cls(path, num_tokens, num_documents, token_nbytes, tokenizer)

    def tokens(self) -> Shaped[np.ndarray, "T"]:
        """Return the token ids as a read-only view of the file; pages are read when touched."""
        return _map(self.path, WIDTHS[self.token_nbytes])

    def document_ends(self) -> Shaped[np.ndarray, "docs"]:
        """Return where each document ends, in tokens from the start of the file."""
        return _map(self.path.with_name(self.path.name + ".index"), np.dtype("<u8"))


class ShardWriter:
    """Writes one shard, document by document; a context manager that gives the files their names when all went well.

    Until then they end in .tmp, which no reader looks at; after an error they are removed. With `order`, a function of the number of
    documents, these are written again in the order that it returns, through a memory map: 24 bytes a document are all that memory holds.
    """

    def __init__(
        self, path: Path, tokenizer: str, token_nbytes: int, order: Callable[[int], Int64[np.ndarray, "docs"]] | None = None
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.dtype = WIDTHS[token_nbytes]
        self.order = order
        self.ends = array("Q")
        self.num_tokens = 0

    def __enter__(self) -> "ShardWriter":
        self._file = self._temporary("").open("wb")
        return self

    def append(self, ids: Shaped[np.ndarray, "T"]) -> None:
        """Append one document's token ids."""
        self.extend(ids, [len(ids)])

    def extend(self, ids: Shaped[np.ndarray, "T"], lengths: list[int]) -> None:
        """Append the token ids of some documents, back to back."""
        self._file.write(ids.astype(self.dtype, copy=False).data)
        for length in lengths:
            self.num_tokens += length
            self.ends.append(self.num_tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()  # may still have to write, and find the disk full
            if kind is None:
                self._finish()
        finally:
            for suffix in ("", ".index", ".metadata", ".ordered"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _finish(self) -> None:
        if self.order is not None and len(self.ends) > 1:
            self._reorder(self.order(len(self.ends)))
        self._temporary(".index").write_bytes(np.frombuffer(self.ends, np.uint64).astype("<u8").data)
        lines = f"{self.tokenizer}|{self.dtype.itemsize}\n{self.num_tokens}\n{_for_people(self.num_tokens)}T"
        self._temporary(".metadata").write_text(lines, encoding="utf-8")
        for suffix in (".index", "", ".metadata"):
            self._temporary(suffix).replace(self.path.with_name(self.path.name + suffix))

    def _reorder(self, order: Int64[np.ndarray, "docs"]) -> None:
        """Write the documents again, in this order."""
        tokens, ends = _map(self._temporary(""), self.dtype), self.ends
        self.ends, self.num_tokens = array("Q"), 0
        with self._temporary(".ordered").open("wb") as self._file:
            for number in map(int, order):
                self.append(tokens[ends[number - 1] if number else 0 : ends[number]])
        self._temporary(".ordered").replace(self._temporary(""))

    def _temporary(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}.tmp")


def _read_metadata(path: Path) -> tuple[str, int]:
    """Return the tokenizer's name and the bytes per token."""
    metadata = path.with_name(path.name + ".metadata")
    if not metadata.is_file():
        raise ConfigError(f"{metadata} is missing, so that the width of the tokens is not known: prepare or copy {path.name} again")
    first = metadata.read_text(encoding="utf-8", errors="replace").split("\n")[0]
    tokenizer, _, width = first.rpartition("|")
    if width not in ("2", "4"):
        raise ConfigError(f'{metadata} begins with "{first[:80]}", not with "tokenizer|2" or "tokenizer|4": the width is not known')
    return tokenizer, int(width)


def _map(path: Path, dtype: np.dtype[Any]) -> Shaped[np.ndarray, "n"]:
    """Map a file read-only; a bare ndarray, since slicing np.memmap costs 5 times as much."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _for_people(count: int) -> str:
    """Return 11 as "11.0 ", 35164 as "35.2 k"."""
    value, units = float(count), ["", "k", "M", "G", "T", "P"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.1f} {units[0]}"
