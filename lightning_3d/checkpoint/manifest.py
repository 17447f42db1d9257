"""Sizes and checksums of a checkpoint's files.

A file has one checksum for every 4 MiB, so that what is read can be checked as it is read, whatever part of the file that is. It is
XXH3-128, which runs as fast as memory does: it is there against accidents, not against people.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from lightning_3d.checkpoint.store import Place, open_unbuffered, sizes, to_disk
from lightning_3d.errors import ConfigError, DamagedCheckpointError

MANIFEST_FILE = "manifest.json"
_VERSION = 2
_BLOCK_NBYTES = 4 << 20
_PIECE_NBYTES = 512 << 10  # read or written, and hashed while it is in a core's cache


class Entry(TypedDict):
    """What is known of a file."""

    nbytes: int
    xxh3_128: list[str]  # of each block


Entries = dict[str, Entry]


class Recorded:
    """A file that is being written from front to back, and what a manifest will say of it: nothing is read again."""

    def __init__(self, file: Any) -> None:
        self._file, self._hasher, self._nbytes = file, xxhash.xxh3_128(), 0
        self._checksums: list[str] = []

    def write(self, content: Any) -> int:
        """Write and count."""
        view = memoryview(content).cast("B")
        begin = 0
        while begin < view.nbytes:
            done = self._nbytes % _BLOCK_NBYTES
            piece = view[begin : begin + min(_PIECE_NBYTES, _BLOCK_NBYTES - done)]
            self._hasher.update(piece)
            self._file.write(piece)
            begin, self._nbytes = begin + piece.nbytes, self._nbytes + piece.nbytes
            if self._nbytes % _BLOCK_NBYTES == 0:
                self._checksums.append(self._hasher.hexdigest())
                self._hasher.reset()
        return view.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def entry(self) -> Entry:
        """Of what was written so far."""
        last = [self._hasher.hexdigest()] if self._nbytes % _BLOCK_NBYTES else []
        return {"nbytes": self._nbytes, "xxh3_128": self._checksums + last}


class Sound:
    """A file that is being read, from front to back or nearly so: each block that any of it is in is read to its end, and checked.

    What was read is believed once the file is closed.

    Args:
        file: open for reading.
        name: for messages.
        entry: what the manifest says of it.
        block_nbytes: bytes for each checksum.
    """

    def __init__(self, file: Any, name: str, entry: Entry, block_nbytes: int) -> None:
        self._file, self._name, self._entry, self._block_nbytes = file, name, entry, block_nbytes
        self._aside = memoryview(bytearray(_PIECE_NBYTES))
        self._hasher = xxhash.xxh3_128()
        self._begin = self._at = self._end = 0  # of the block that is being read; of the file

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill the target with what stands from an offset on.

        Raises:
            DamagedCheckpointError: a block that ends there is not what was written, or the file ends before.
        """
        assert offset + target.nbytes <= self._entry["nbytes"]
        while target.nbytes:
            if not self._at <= offset < self._end:
                self.close()
                self._begin = self._at = offset // self._block_nbytes * self._block_nbytes
                self._end = min(self._begin + self._block_nbytes, self._entry["nbytes"])
                self._file.seek(self._begin)
            self._pass_over(offset)
            part, target = target[: self._end - offset], target[self._end - offset :]
            self._read(part)
            offset += part.nbytes

    def check(self) -> None:
        """Read all of it."""
        for begin in range(0, self._entry["nbytes"], self._block_nbytes):
            self.read_into(begin, self._aside[:1])

    def close(self) -> None:
        """Read the last block to its end.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        self._pass_over(self._end)

    def _pass_over(self, offset: int) -> None:
        while self._at < offset:
            self._read(self._aside[: offset - self._at])

    def _read(self, target: memoryview) -> None:
        """Read on, at most to the end of the block."""
        begin = 0
        while begin < target.nbytes:
            count = self._file.readinto(target[begin : begin + _PIECE_NBYTES])
            if not count:
                raise DamagedCheckpointError(f"{self._name} is cut off")
            self._hasher.update(target[begin : begin + count])
            begin += count
        self._at += target.nbytes
        if self._at == self._end:
            if self._hasher.hexdigest() != self._entry["xxh3_128"][self._begin // self._block_nbytes]:
                raise DamagedCheckpointError(f"{self._name} is not what was written: its checksum is another")
            self._hasher.reset()


class Manifest:
    """What a checkpoint should consist of; one that cannot be read says of itself that it is cut off.

    Args:
        folder: of the checkpoint.

    Raises:
        ConfigError: it was written by another version.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.files: Entries = {MANIFEST_FILE: Entry(nbytes=-1, xxh3_128=[])}
        self._block_nbytes, version = _BLOCK_NBYTES, _VERSION
        try:
            with (folder / MANIFEST_FILE).open("rb") as file:
                written = json.loads(file.read())
            if (version := written["version"]) == _VERSION:
                self._block_nbytes, self.files = written["block_nbytes"], written["files"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
        if version != _VERSION:
            raise ConfigError(
                f"{folder} has a manifest of version {version}, this lightning_3d reads {_VERSION}: use the one that wrote it"
            )

    def missing(self) -> str | None:
        """What is missing or cut off, in words; files are not read."""
        there = sizes(self.folder)
        for name, entry in self.files.items():
            if name not in there:
                return f"{name} is missing"
            if there[name] != entry["nbytes"]:
                return f"{name} has {there[name]:,} bytes instead of {entry['nbytes']:,}"
        return None

    @contextmanager
    def open(self, name: str) -> Iterator[Sound]:
        """Open a file to read from it.

        Raises:
            DamagedCheckpointError: when it is closed at the latest: something that was read is not what was written.
        """
        with open_unbuffered(self.folder / name) as file:
            sound = Sound(file, name, self.files[name], self._block_nbytes)
            yield sound
            sound.close()

    def read(self, name: str) -> bytearray:
        """All of a file.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        if found := self.missing():
            raise DamagedCheckpointError(found)
        content = bytearray(self.files[name]["nbytes"])
        with self.open(name) as file:
            file.read_into(0, memoryview(content))
        return content


def entries_of(paths: Iterable[Path]) -> Entries:
    """What a manifest says of these files, by name; reads them."""
    entries = Entries()
    with open(os.devnull, "wb") as nothing:
        for path in paths:
            recorded = Recorded(nothing)
            recorded.write(path.read_bytes())
            entries[path.name] = recorded.entry()
    return entries


def write_manifest(folder: Place, entries: Entries) -> None:
    """Write the manifest, to the disk."""
    written = {"version": _VERSION, "block_nbytes": _BLOCK_NBYTES, "files": dict(sorted(entries.items()))}
    with (folder / MANIFEST_FILE).open("wb") as file:
        file.write(json.dumps(written, indent=1).encode())
        to_disk(file)


def damage(folder: Place) -> str | None:
    """What is missing, cut off or altered, in words; reads all files."""
    manifest = Manifest(folder)
    if found := manifest.missing():
        return found
    try:
        for name in manifest.files:
            with manifest.open(name) as file:
                file.check()
    except DamagedCheckpointError as error:
        return str(error)
    return None
