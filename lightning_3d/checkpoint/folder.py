"""A checkpoint is a folder; it is there for readers only once it is whole.

    step-100/  .metadata          what is where (torch.distributed.checkpoint)
               __0_0.distcp ...   the ranks' shards
               trainer.pt         Lightning's state: loops, schedulers, callbacks, data position; plain types only
               manifest.json      size and checksum of each of these

It is written beside, as ``.step-100.unfinished``, and renamed; what is removed is renamed first. So what a killed run leaves behind has a
hidden name, and the next run of the same folder clears it away. One that turns out to be damaged is renamed ``step-100.damaged``
and kept. Under other strategies a checkpoint is one file, ``step-100``.

Object stores (store.py) cannot rename. There it is written in place, with an object ``.unfinished`` first and the manifest last; what is
removed gets the one and loses the other first; a damaged one keeps its objects, but not the name of its manifest, until its step
is saved again.
"""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_3d.checkpoint.manifest import MANIFEST_FILE, Manifest
from lightning_3d.checkpoint.store import Place, StorePath, at, sizes

TRAINER_FILE = "trainer.pt"
_STEP = re.compile(r"step-(\d+)")
UNFINISHED_FILE = ".unfinished"  # in object stores
_OUR_FILES = {".metadata", TRAINER_FILE, MANIFEST_FILE, f"{MANIFEST_FILE}.damaged", UNFINISHED_FILE}
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_LEFT_BEHIND = re.compile(r"\.step-\d+\.(unfinished|removed)")


def step_folder(root: str | Place, step: int) -> Place:
    """Where the checkpoint of a step lies."""
    return at(root) / f"step-{step}"


def is_whole(path: str | Place) -> bool:
    """Whether this is a checkpoint that was written to its end, and nothing is missing or cut off since; contents are not read."""
    path = at(path)
    return path.is_file() or (is_checkpoint(path) and Manifest(path).missing() is None)


def is_checkpoint(path: str | Place) -> bool:
    """Whether this is a folder of ours, perhaps with files missing."""
    return (at(path) / MANIFEST_FILE).is_file()


def whole_steps(root: str | Place) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending; foreign files and folders are passed over."""
    return sorted(int(match[1]) for path in _inside(root) if (match := _STEP.fullmatch(path.name)) and is_whole(path))


def latest_checkpoint(root: str | Place, before: str | Place | None = None) -> Place | None:
    """The newest whole checkpoint in a folder, or None; on request the newest of those older than another."""
    match = _STEP.fullmatch(at(before).name) if before else None
    steps = [step for step in whole_steps(root) if match is None or step < int(match[1])]
    return step_folder(root, steps[-1]) if steps else None


def is_foreign(folder: Place) -> bool:
    """Whether something stands there that is not a checkpoint, and must not be replaced by one."""
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        return True
    return any(name not in _OUR_FILES and not _SHARD.fullmatch(name) for name in sizes(folder))


def unfinished(folder: Place) -> Place:
    """Where a checkpoint is written before it is whole."""
    return folder if isinstance(folder, StorePath) else _hidden(folder, "unfinished")


def begin(folder: Place) -> Place:
    """An empty place to write a checkpoint to, whatever an earlier try has left there."""
    place = unfinished(folder)
    if isinstance(place, StorePath):
        remove(place)
        _mark(place)
    else:
        _delete(place)
        place.mkdir(parents=True)
    return place


def commit(folder: Place) -> None:
    """Make the finished checkpoint visible; on a disk an older one of the same name gives way only now."""
    if isinstance(folder, StorePath):
        (folder / UNFINISHED_FILE).delete()  # the manifest is there
        return
    old = _set_aside(folder)
    _hidden(folder, "unfinished").rename(folder)
    _sync(folder.parent)
    _delete(old)


def remove(path: str | Place) -> None:
    """Remove a checkpoint; at no moment is part of it taken for a whole one."""
    place = at(path)
    if isinstance(place, StorePath):
        if place.is_dir():
            _mark(place)
        (place / MANIFEST_FILE).delete()
        place.delete()
    else:
        _delete(_set_aside(place))


def abandon(folder: Place) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    with suppress(OSError):
        _delete(unfinished(folder))


def set_damaged_aside(folder: Place) -> Place:
    """Rename a damaged checkpoint, so that it is not taken for a whole one again; its new name."""
    if isinstance(folder, StorePath):
        (folder / MANIFEST_FILE).rename(folder / f"{MANIFEST_FILE}.damaged")
        return folder
    aside = folder.with_name(f"{folder.name}.damaged")
    _delete(aside)
    folder.rename(aside)
    return aside


def clear_leftovers(root: str | Place) -> None:
    """Remove what killed runs left of unfinished saves and removals."""
    for path in list(_inside(root)):
        if _LEFT_BEHIND.fullmatch(path.name):
            _delete(path)
        elif isinstance(path, StorePath) and _STEP.fullmatch(path.name) and (path / UNFINISHED_FILE).is_file() and not is_checkpoint(path):
            path.delete()


def _inside(root: str | Place) -> Iterable[Place]:
    place = at(root)
    return place.iterdir() if place.is_dir() else ()


def _mark(place: StorePath) -> None:
    with (place / UNFINISHED_FILE).open("wb") as file:
        file.write(b"not a whole checkpoint unless there is a manifest.json\n")


def _hidden(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _set_aside(path: Path) -> Path:
    hidden = _hidden(path, "removed")
    if path.exists():
        _delete(hidden)
        path.rename(hidden)
    return hidden


def _delete(path: Place) -> None:
    if isinstance(path, StorePath):
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the new name is on disk, not only in the page cache
    finally:
        os.close(handle)
