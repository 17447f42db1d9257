"""Sizes and checksums of a checkpoint's files.

torch.distributed.checkpoint notices a file that is cut off, but loads a flipped bit without a word. The checksum is XXH3-128, which runs as
fast as memory does: it is there against accidents, not against people.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from lightning_3d.checkpoint.store import Place, sizes, to_disk

MANIFEST_FILE = "manifest.json"
_CHUNK_NBYTES = 8 << 20


class Entry(TypedDict):
    """What is known of a file."""

    nbytes: int
    xxh3_128: str


Entries = dict[str, Entry]


def entries_of(paths: Iterable[Path]) -> Entries:
    """What a manifest says of these files, by name; reads them."""
    return {path.name: {"nbytes": path.stat().st_size, "xxh3_128": _checksum(path)} for path in paths}


class Recorded:
    """A file that is being written from front to back, and what a manifest will say of it: nothing is read again."""

    def __init__(self, file: Any) -> None:
        self._file, self._hasher, self._nbytes = file, xxhash.xxh3_128(), 0

    def write(self, content: Any) -> int:
        """Write and count."""
        view = memoryview(content)
        self._hasher.update(view)
        self._nbytes += view.nbytes
        return int(self._file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def entry(self) -> Entry:
        """Of what was written so far."""
        return {"nbytes": self._nbytes, "xxh3_128": self._hasher.hexdigest()}


def write_manifest(folder: Place, entries: Entries) -> None:
    """Write the manifest, to the disk."""
    with (folder / MANIFEST_FILE).open("wb") as file:
        file.write(json.dumps({"version": 1, "files": dict(sorted(entries.items()))}, indent=1).encode())
        to_disk(file)


def missing(folder: Place) -> str | None:
    """What is missing or cut off, in words; files are not read."""
    there = sizes(folder)
    for name, entry in _entries(folder).items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != entry["nbytes"]:
            return f"{name} has {there[name]:,} bytes instead of {entry['nbytes']:,}"
    return None


def damage(folder: Place, part: int = 0, parts: int = 1) -> str | None:
    """What is missing, cut off or altered in one of `parts` shares of the files, in words; reads all of them."""
    if found := missing(folder):
        return found
    by_size = sorted(_entries(folder).items(), key=lambda item: (item[1]["nbytes"], item[0]))
    altered = (name for name, entry in by_size[part::parts] if _checksum(folder / name) != entry["xxh3_128"])
    return next((f"{name} is not what was written: its checksum is another" for name in altered), None)


def _entries(folder: Place) -> Entries:
    try:
        with (folder / MANIFEST_FILE).open("rb") as file:
            return json.loads(file.read())["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {MANIFEST_FILE: {"nbytes": -1, "xxh3_128": ""}}  # says of itself that it is cut off


def _checksum(path: Place) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()
