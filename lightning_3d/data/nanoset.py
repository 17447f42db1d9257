"""A folder of tokens, read as windows: sample i is tokens [i*S, i*S + S] of all files one after the other.

Windows are S+1 tokens long and overlap by one, across documents and files, so that every token but the very first is a
target exactly once (Nanotron's reader drops one target in S+1 and the tail of every file). The last window may run past the
end: what is missing is IGNORE, never a target. Memory is a few hundred bytes a file, whatever its size; files are mapped when first
read, and a copy sent to a worker process maps them anew.
"""

import hashlib
import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from lightning_3d.data.shards import Shard
from lightning_3d.errors import ConfigError

IGNORE = -100  # what torch's cross entropy skips
SUMMARY = "nanoset.json"  # what `prepare` says about a folder, kept in it


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
        widths = {shard.token_nbytes: shard.path.name for shard in self.shards}
        if len(widths) > 1:
            raise ConfigError(f"{folder} mixes tokens of 2 bytes ({widths[2]}) and of 4 bytes ({widths[4]}): keep them in separate folders")
        self.token_nbytes = self.shards[0].token_nbytes
        self._begins = [0, *accumulate(shard.num_tokens for shard in self.shards)]
        self.num_tokens = self._begins[-1]
        if self.num_tokens < sequence_length + 1:
            raise ConfigError(
                f"sequence_length {sequence_length} needs windows of {sequence_length + 1} tokens, "
                f"but {folder} holds {self.num_tokens} in all: shorten it or give more data"
            )
        self._views: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}  # a map would be pickled as all of its bytes

    def windows(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the windows of these samples; past the end of the data, so for ids >= len too, tokens are IGNORE."""
        out = np.full((len(ids), self.sequence_length + 1), IGNORE, np.int64)
        for row, sample in zip(out, ids.tolist(), strict=True):
            self._fill(row, sample * self.sequence_length)
        return out

    def _fill(self, row: Int64[np.ndarray, "window"], begin: int) -> None:
        """Fill a row from token `begin` on, over as many files as it takes."""
        filled = 0
        number = bisect_right(self._begins, begin) - 1
        while filled < len(row) and number < len(self.shards):
            offset = begin + filled - self._begins[number]
            part = self._view(number)[offset : offset + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            number += 1

    def _view(self, number: int) -> Shaped[np.ndarray, "T"]:
        if number not in self._views:
            self._views[number] = self.shards[number].tokens()
        return self._views[number]

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
            view = self._view(number)
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
