"""Sizes and checksums of a checkpoint's files.

torch.distributed.checkpoint notices a file that is cut off, but loads a flipped bit without a word. The checksum is XXH3-128, which runs as
fast as memory does: it is there against accidents, not against people.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import xxhash

MANIFEST_FILE = "manifest.json"
_CHUNK_NBYTES = 8 << 20


class Entry(TypedDict):
    """What is known of a file."""

    nbytes: int
    xxh3_128: str


Entries = dict[str, Entry]


def entries_of(paths: Iterable[Path]) -> Entries:
    """What a manifest says of these files, by name."""
    return {path.name: {"nbytes": path.stat().st_size, "xxh3_128": _checksum(path)} for path in paths}


def write_manifest(folder: Path, entries: Entries) -> None:
    """Write the manifest, to the disk."""
    with (folder / MANIFEST_FILE).open("w") as file:
        json.dump({"version": 1, "files": dict(sorted(entries.items()))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def missing(folder: Path) -> str | None:
    """What is missing or cut off, in words; files are not read."""
    for name, entry in _entries(folder).items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (nbytes := path.stat().st_size) != entry["nbytes"]:
            return f"{name} has {nbytes:,} bytes instead of {entry['nbytes']:,}"
    return None


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is missing, cut off or altered in one of `parts` shares of the files, in words; reads all of them."""
    if found := missing(folder):
        return found
    by_size = sorted(_entries(folder).items(), key=lambda item: (item[1]["nbytes"], item[0]))
    altered = (name for name, entry in by_size[part::parts] if _checksum(folder / name) != entry["xxh3_128"])
    return next((f"{name} is not what was written: its checksum is another" for name in altered), None)


def _entries(folder: Path) -> Entries:
    try:
        return json.loads((folder / MANIFEST_FILE).read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return {MANIFEST_FILE: {"nbytes": -1, "xxh3_128": ""}}  # says of itself that it is cut off


def _checksum(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()
