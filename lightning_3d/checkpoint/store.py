"""Where checkpoints lie: folders of a file system, and object stores (`s3://bucket/run`, any URL that fsspec knows).

An object appears when it is complete, but nothing can be renamed: a "folder" is only how names begin. There the manifest, written
last and removed first, is what makes a checkpoint whole, where a folder on a disk is made whole by its name (folder.py). Nobody
locks a store either: that one run writes there is up to whoever starts runs.

Credentials and addresses are those that the store's library finds by itself, for S3 in the environment (`AWS_ENDPOINT_URL`) or `~/.aws`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_3d.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_BLOCK_NBYTES, _BLOCKS = 16 << 20, 8  # read at once, and held of a file: tensors are read from front to back, their ends first


def _os_error(function: Callable[P, R]) -> Callable[P, R]:
    """Whatever a store's library raises, as an error of input and output, which a disk would raise."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (OSError, ConfigError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return call


@dataclass(frozen=True)
class StorePath:
    """An object, or what several names begin with: of pathlib.Path the methods that checkpoints need."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        """All but the last part."""
        return StorePath(self.url.rpartition("/")[0])

    @_os_error
    def is_file(self) -> bool:
        """Whether there is such an object."""
        fs, path = self._open_store()
        return bool(fs.isfile(path))

    @_os_error
    def is_dir(self) -> bool:
        """Whether there are objects whose names go on from here."""
        fs, path = self._open_store()
        return bool(fs.isdir(path))

    @_os_error
    def sizes(self) -> dict[str, int]:
        """Names one level below, with their bytes."""
        fs, path = self._open_store()
        try:
            found = fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] or 0 for entry in found if entry["name"].rstrip("/") != path}

    def iterdir(self) -> Iterator["StorePath"]:
        """What is one level below."""
        return (self / name for name in self.sizes())

    @_os_error
    def open(self, mode: str = "rb") -> Any:
        """As a file of bytes; one that is written appears when it is closed."""
        fs, path = self._open_store()
        options = {"cache_type": "blockcache", "cache_options": {"maxblocks": _BLOCKS}} if "r" in mode else {}
        return fs.open(path, mode, block_size=_BLOCK_NBYTES, **options)

    @_os_error
    def rename(self, target: "StorePath") -> None:
        """Copy and delete: for small objects."""
        fs, path = self._open_store()
        fs.mv(path, target._open_store()[1])

    @_os_error
    def delete(self) -> None:
        """The object and all that is below, where there is any."""
        fs, path = self._open_store()
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def _open_store(self) -> tuple[Any, str]:
        try:
            return url_to_fs(self.url, use_listings_cache=False)  # other processes write there, too
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.url}: {error} (for s3://, pip install 'lightning-3d[s3]')") from error


Place = Path | StorePath


def at(path: str | Place) -> Place:
    """A place by its path or URL; `file://` is a path."""
    text = str(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return StorePath(text.rstrip("/")) if "://" in text else Path(path)  # type: ignore[arg-type]  # a StorePath has a URL


def sizes(folder: Place) -> dict[str, int]:
    """Names in a folder, with their bytes; in a store, one request."""
    if isinstance(folder, StorePath):
        return folder.sizes()
    found: dict[str, int] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a run is removing an old checkpoint while someone looks
                found[entry.name] = entry.stat().st_size
    return found


def open_unbuffered(path: Place) -> Any:
    """Open for reads that go straight to the reader's memory; of a store, blocks are kept."""
    return path.open("rb", buffering=0) if isinstance(path, Path) else path.open("rb")


def to_disk(file: Any) -> None:
    """What was written is on the disk, not only in the page cache; an object is in its store when it is closed."""
    file.flush()
    with suppress(UnsupportedOperation):
        os.fsync(file.fileno())
