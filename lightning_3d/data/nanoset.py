"""A folder of tokens, read as windows: sample i is tokens [i*S, i*S + S] of all files one after the other.

Windows are S+1 tokens long and overlap by one, across documents and files, so that every token but the very first is a
target exactly once (Nanotron's reader drops one target in S+1 and the tail of every file). The last window may run past the
end: what is missing is IGNORE, never a target. Memory is a few hundred bytes a file, whatever its size; files are mapped when first
read, and a copy sent to a worker process maps them anew.
"""

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from lightning_3d.data.documents import positions_of_runs
from lightning_3d.data.shards import Shard
from lightning_3d.errors import ConfigError

IGNORE = -100  # what torch's cross entropy skips
_ZERO = np.zeros(1, np.uint64)
SUMMARY = "nanoset.json"  # what `prepare` says about a folder, kept in it


class _Pieces(NamedTuple):
    """Parts of files that make up windows, one after the other: numbers of files, and tokens within them."""

    numbers: Int64[np.ndarray, "n"]
    begins: Int64[np.ndarray, "n"]
    ends: Int64[np.ndarray, "n"]


class _Maps(dict[int, np.ndarray]):
    """Maps of files by the number of the shard, each made when first asked for; a copy starts without any."""

    def __init__(self, shards: list[Shard], read: Callable[[Shard], np.ndarray]) -> None:
        self._shards, self._read = shards, read

    def __missing__(self, number: int) -> np.ndarray:
        self[number] = self._read(self._shards[number])
        return self[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Maps, (self._shards, self._read)  # a map would be pickled as all of its bytes


class Nanoset:
    """The windows of `sequence_length` + 1 tokens of a folder written by `prepare` or by datatrove.

    Raises:
        ConfigError: the folder is missing, empty or foreign, a file is incomplete, files differ in width, or all the data
            is shorter than one window.
    """

    def __init__(self, folder: str | Path, sequence_length: int) -> None:
        self.folder = Path(folder)
        self.sequence_length = sequence_length
        self.shards = [Shard.open(path) for path in _shard_paths(self.folder)]
        tokenizers = {shard.tokenizer: shard.path.name for shard in self.shards}
        if len(tokenizers) > 1:
            (one, path), (other, second), *_ = tokenizers.items()
            raise ConfigError(f"{folder} mixes tokens of {one} ({path}) and of {other} ({second}): keep them in separate folders")
        widths = {shard.token_nbytes: shard.path.name for shard in self.shards}
        if len(widths) > 1:
            raise ConfigError(f"{folder} mixes tokens of 2 bytes ({widths[2]}) and of 4 bytes ({widths[4]}): keep them in separate folders")
        self.token_nbytes = self.shards[0].token_nbytes
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)
        if self.num_tokens < sequence_length + 1:
            raise ConfigError(
                f"sequence_length {sequence_length} needs windows of {sequence_length + 1} tokens, "
                f"but {folder} holds {self.num_tokens} in all: shorten it or give more data"
            )
        self._begins = np.cumsum([0, *2 * [shard.num_tokens for shard in self.shards]])  # twice: see _pieces
        self._tokens = _Maps(self.shards, Shard.tokens)
        self._ends = _Maps(self.shards, Shard.document_ends)

    def __len__(self) -> int:
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def windows(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the windows of these samples; past the end of the data, so for ids >= len too, tokens are IGNORE."""
        pieces, tokens = self._pieces(ids), self._tokens
        spans = zip(pieces.numbers.tolist(), pieces.begins.tolist(), pieces.ends.tolist(), strict=True)
        out = np.concatenate([tokens[number][begin:end] for number, begin, end in spans]).astype(np.int64)
        out = out.reshape(len(ids), self.sequence_length + 1)
        for row in np.flatnonzero(ids >= (self.num_tokens - 1) // self.sequence_length).tolist():
            out[row, max(0, self.num_tokens - int(ids[row]) * self.sequence_length) :] = IGNORE
        return out

    def positions(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the position in its document of each token of these windows; past the end of the data they mean nothing.

        Raises:
            ConfigError: an index does not ascend.
        """
        pieces, ends = self._pieces(ids), self._ends
        low, high = self._find(pieces)
        starts = []  # of the documents that each piece touches
        for number, first, last in zip(pieces.numbers.tolist(), low.tolist(), high.tolist(), strict=True):
            starts += [ends[number][first - 1 : last]] if first else [_ZERO, ends[number][:last]]
        lengths = pieces.ends - pieces.begins
        offsets = lengths.cumsum() - lengths  # of the pieces in the rows, one row after the other
        try:
            counts = high - low + 1
            origins = np.concatenate(starts).astype(np.int64) + (offsets - pieces.begins).repeat(counts)
            positions = positions_of_runs(np.maximum(origins, offsets.repeat(counts)), origins, len(ids) * (self.sequence_length + 1))
        except ValueError:
            raise self._disorder(pieces, low, high) from None
        return positions.reshape(len(ids), -1)

    def _pieces(self, ids: Int64[np.ndarray, "n"]) -> "_Pieces":
        """Cut windows where files end; past the end of the data the first file follows the last."""
        begins = np.minimum(ids * self.sequence_length, self.num_tokens)
        ends = begins + (self.sequence_length + 1)
        numbers = self._begins.searchsorted(begins, "right") - 1
        if (ends > self._begins[numbers + 1]).any():
            counts = self._begins.searchsorted(ends, "left") - numbers
            numbers = np.arange(counts.sum()) + (numbers + counts - counts.cumsum()).repeat(counts)
            begins = np.maximum(begins.repeat(counts), self._begins[numbers])
            ends = np.minimum(ends.repeat(counts), self._begins[numbers + 1])
            some = begins < ends  # a file may be empty
            numbers, begins, ends = numbers[some], begins[some], ends[some]
        origins = self._begins[numbers]
        return _Pieces(numbers % len(self.shards), begins - origins, ends - origins)

    def _find(self, pieces: "_Pieces") -> Int64[np.ndarray, "2 n"]:
        """Return for each piece how many documents end up to its first token, and how many before its last is over."""
        order = pieces.numbers.argsort(kind="stable")
        keys = np.stack([pieces.begins + 1, pieces.ends])[:, order].astype(np.uint64)  # as the index: numpy would copy all of it
        numbers = pieces.numbers[order]
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(order)]
        found = np.empty(keys.shape, np.int64)
        for begin, end in pairwise(cuts):
            found[:, order[begin:end]] = self._ends[int(numbers[begin])].searchsorted(keys[:, begin:end])
        return found

    def _disorder(self, pieces: "_Pieces", low: Int64[np.ndarray, "n"], high: Int64[np.ndarray, "n"]) -> ConfigError:
        """Say in which index documents end before they begin."""
        spans = zip(
            pieces.numbers.tolist(), pieces.begins.tolist(), np.minimum(low, high).tolist(), np.maximum(low, high).tolist(), strict=True
        )
        unordered = ((number, begin) for number, begin, low, high in spans if _descends(self._ends[number][max(0, low - 1) : high + 1]))
        number, begin = next(unordered)
        return ConfigError(f"{self.shards[number].path}.index does not ascend near token {begin}: prepare or copy it again")

    @property
    def num_documents(self) -> int:
        """Documents in all files."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def summary(self) -> dict[str, Any]:
        """What `prepare` wrote about the folder (vocab_size, eos_token_id, ...); empty for a folder of another tool."""
        path = self.folder / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's vocabulary where the folder says so, else None; ids are below 2^16 or 2^32 in any case."""
        return self.summary.get("vocab_size")

    def fingerprint(self) -> dict[str, int | str]:
        """Tell this stream of tokens from another, wherever the folder lies: counts, and a hash of the ends of every file."""
        digest = hashlib.blake2b(digest_size=16)
        for number, shard in enumerate(self.shards):
            view = self._tokens[number]
            digest.update(b"".join([str(shard.num_tokens).encode(), view[:1024].tobytes(), view[-1024:].tobytes()]))
        return {"files": len(self.shards), "documents": self.num_documents, "tokens": self.num_tokens, "digest": digest.hexdigest()}


def _descends(ends: np.ndarray) -> bool:
    return bool((ends[1:] < ends[:-1]).any())


def _shard_paths(folder: Path) -> list[Path]:
    """Return the folder's .ds files in the order of their names."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name one that `python -m lightning_3d prepare` or datatrove wrote")
    if paths := sorted(folder.glob("*.ds")):
        return paths
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        raise ConfigError(f"{folder} is empty: prepare the data again, or name another folder")
    if inner := sorted(path.parent.name for path in folder.glob("*/*.ds")):
        raise ConfigError(f"{folder} holds no .ds files itself, but {inner[0]}/ does: name {folder / inner[0]}")
    raise ConfigError(f"{folder} holds no .ds files, but {', '.join(names[:3])}: it is not a Nanoset; name another folder")
