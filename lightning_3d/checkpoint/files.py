"""What torch.distributed.checkpoint writes to and reads from: places of either kind (store.py), with checksums taken on the way.

Torch has a writer for fsspec too, in a private module. Its public ``FileSystem`` is enough for both, sees every byte that is written,
and puts no path of this machine into the checkpoint.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from io import IOBase
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

from lightning_3d.checkpoint.manifest import Entries, Recorded
from lightning_3d.checkpoint.store import Place, StorePath, at


class Files(FileSystem):
    """The calls of torch's readers and writers; ``entries`` are the manifest's of what was written."""

    def __init__(self) -> None:
        self.entries: Entries = {}

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[IOBase, None, None]:
        with path.open(mode) as file:
            if "r" in mode:
                yield file
                return
            recorded = Recorded(file)
            yield cast(IOBase, recorded)
            self.entries[path.name] = recorded.entry()

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return at(path) / suffix

    @override
    def init_path(self, path: Any) -> Any:
        return at(path)

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.entries[new_path.name] = self.entries.pop(path.name)

    @override
    def mkdir(self, path: Any) -> None:
        """There already, or made by the first object."""

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    @override
    def exists(self, path: Any) -> bool:
        return bool(path.is_file())

    @override
    def rm_file(self, path: Any) -> None:
        path.unlink()


class Writer(dcp.FileSystemWriter):
    """Writes a rank's shards, and on rank 0 what is where.

    Args:
        place: where; it is empty.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(str(place), sync_files=not isinstance(place, StorePath))
        self.fs = self._files = Files()
        self.path = cast(Any, place)

    @property
    def entries(self) -> Entries:
        """Of this rank's files."""
        return self._files.entries

    @property
    @override
    def checkpoint_id(self) -> str:
        return at(str(self.path)).name  # it goes into the checkpoint


class Reader(dcp.FileSystemReader):
    """Reads the parts of shards that are asked for."""

    def __init__(self, place: Place) -> None:
        super().__init__(str(place))
        self.fs = Files()
        self.path = cast(Any, place)
