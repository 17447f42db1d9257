"""A folder of tokens, read as windows: sample i is tokens [i*S, i*S + S] of all files one after the other.

Windows are S+1 tokens long and overlap by one, across documents and files, so that every token but the very first is a
target exactly once (Nanotron's reader drops one target in S+1 and the tail of every file). The last window may run past the
end: what is missing is IGNORE, never a target. Memory is a few hundred bytes a file, whatever its size; files are mapped when first
read, and a copy sent to a worker process maps them anew.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from lightning_3d.data.documents import HeldStarts, Starts, positions_from_starts, search_starts
from lightning_3d.data.shards import Shard
from lightning_3d.errors import ConfigError

IGNORE = -100  # what torch's cross entropy skips
HELD = 1 << 20  # numbers (8 MB) that may be held in memory to find documents in a fifth of the time
SUMMARY = "nanoset.json"  # what `prepare` says about a folder, kept in it


class _Pieces(NamedTuple):
    """Parts of files that make up windows, one after the other."""

    rows: Int64[np.ndarray, "n"]  # the windows
    numbers: Int64[np.ndarray, "n"]  # the files
    origins: Int64[np.ndarray, "n"]  # where these begin
    spans: Int64[np.ndarray, "2 n"]  # from token to token within them


class _Maps(dict[int, np.ndarray]):
    """Maps of files by the number of the shard, each made when first asked for; a copy starts without any."""

    def __init__(self, shards: list[Shard], read: Callable[[Shard], np.ndarray]) -> None:
        self._shards, self._read = shards, read

    def __missing__(self, number: int) -> np.ndarray:
        self[number] = self._read(self._shards[number]) if number < len(self._shards) else np.empty(0, np.uint16)
        return self[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Maps, (self._shards, self._read)  # a map would be pickled as all of its bytes


class Nanoset:
    """The windows of `sequence_length` + 1 tokens of a folder written by `prepare` or by datatrove.

    Raises:
        ConfigError: the folder is missing, empty or foreign, a file is incomplete, files differ in width or in tokenizer, or all
            the data is shorter than one window.
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
        self.num_documents = sum(shard.num_documents for shard in self.shards)
        if self.num_tokens < sequence_length + 1:
            raise ConfigError(
                f"sequence_length {sequence_length} needs windows of {sequence_length + 1} tokens, "
                f"but {folder} holds {self.num_tokens} in all: shorten it or give more data"
            )
        self._begins = np.cumsum([0, *2 * [shard.num_tokens for shard in self.shards]])  # twice: see _pieces
        self._ends_of_files = self._begins[1 : len(self.shards) + 1]
        self._tokens = _Maps(self.shards, Shard.tokens)
        self._indexes = _Maps(self.shards, Shard.document_ends)
        self._starts: HeldStarts | None = None
        self._places = np.arange(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_starts": None, "_places": np.arange(0)}  # made anew where they are needed

    def __len__(self) -> int:
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def windows(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the windows of these samples; past the end of the data, so for ids >= len too, tokens are IGNORE."""
        return self.spans(ids, 0, self.sequence_length + 1)

    def spans(self, ids: Int64[np.ndarray, "n"], start: int, stop: int) -> Int64[np.ndarray, "n span"]:
        """Return tokens `start` to `stop` of these windows, and read no others."""
        begins, window, tokens = ids * self.sequence_length + start, stop - start, self._tokens
        numbers = self._ends_of_files.searchsorted(begins, "right")
        offsets = begins - self._begins[numbers]
        parts = [tokens[number][begin : begin + window] for number, begin in zip(numbers.tolist(), offsets.tolist(), strict=True)]
        out = np.concatenate(parts)
        if cut := out.size < len(ids) * window:  # the end of a file cuts windows short, and that of all files
            pieces = self._pieces(begins, window)
            spans = zip(pieces.numbers.tolist(), *pieces.spans.tolist(), strict=True)
            out = np.concatenate([tokens[number][begin:end] for number, begin, end in spans])
        out = out.astype(np.int64).reshape(-1, window)
        if cut:
            out[begins[:, None] + np.arange(window) >= self.num_tokens] = IGNORE
        return out

    def positions(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the position in its document of each token of these windows; past the end of the data they mean nothing.

        Raises:
            ConfigError: an index does not ascend.
        """
        size = len(ids) * (self.sequence_length + 1)
        if len(self._places) < size:
            self._places = np.arange(size)
        ids = np.minimum(ids, len(self))
        starts = self._held_starts()(ids) if self.num_documents + 2 * len(self) <= HELD else self._search_starts(ids)
        return positions_from_starts(starts, ids * self.sequence_length, self.sequence_length + 1, self._places)

    def _held_starts(self) -> HeldStarts:
        if self._starts is None:
            indexes = {f"{shard.path}.index": shard.document_ends() for shard in self.shards}
            begins = np.arange(len(self) + 1) * self.sequence_length
            self._starts = HeldStarts(indexes, self._begins[: len(self.shards)], begins, self.sequence_length + 1)
        return self._starts

    def _search_starts(self, ids: Int64[np.ndarray, "n"]) -> Starts:
        pieces = self._pieces(ids * self.sequence_length, self.sequence_length + 1)
        starts, counts = search_starts(self._indexes, lambda number: f"{self.shards[number].path}.index", pieces.numbers, pieces.spans)
        return starts + pieces.origins.repeat(counts), np.bincount(pieces.rows, counts, len(ids)).astype(np.int64)

    def _pieces(self, begins: Int64[np.ndarray, "n"], window: int) -> _Pieces:
        """Cut windows where files end; past the end of the data the first file follows the last."""
        begins = np.minimum(begins, self.num_tokens)
        ends = begins + window
        numbers = self._begins.searchsorted(begins, "right") - 1
        counts = self._begins.searchsorted(ends) - numbers
        rows = np.arange(len(begins)).repeat(counts)
        numbers = np.arange(len(rows)) + (numbers + counts - counts.cumsum())[rows]
        origins = self._begins[numbers]
        spans = np.stack([np.maximum(begins[rows], origins), np.minimum(ends[rows], self._begins[numbers + 1])]) - origins
        some = spans[0] < spans[1]  # a file may be empty
        return _Pieces(rows[some], (numbers % len(self.shards))[some], origins[some], spans[:, some])

    @property
    def summary(self) -> dict[str, Any]:
        """What `prepare` wrote about the folder (vocab_size, eos_token_id, ...); empty for a folder of another tool."""
        path = self.folder / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's vocabulary where the folder says so, else None; ids are below 2^16 or 2^32 in any case."""
        return self.summary.get("vocab_size")

    @property
    def tokenizer_path(self) -> Path | None:
        """Where the tokenizer that the files name lies, if it is here: the name is a path as it is, or from the folder or the one above."""
        name = self.shards[0].tokenizer
        places = (Path(name), self.folder / name, self.folder.parent / name) if name else ()
        return next((place.absolute() for place in places if place.exists()), None)

    def fingerprint(self) -> dict[str, int | str]:
        """Tell this stream of tokens from another, wherever the folder lies: counts, and a hash of the ends of every file."""
        digest = hashlib.blake2b(digest_size=16)
        for number, shard in enumerate(self.shards):
            view = self._tokens[number]
            digest.update(b"".join([str(shard.num_tokens).encode(), view[:1024].tobytes(), view[-1024:].tobytes()]))
        return {"files": len(self.shards), "documents": self.num_documents, "tokens": self.num_tokens, "digest": digest.hexdigest()}


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
