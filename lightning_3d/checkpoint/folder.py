"""A checkpoint is a folder; it is there for readers only once it is whole.

    step-100/  .metadata          what is where (torch.distributed.checkpoint)
               __0_0.distcp ...   the ranks' shards
               trainer.pt         Lightning's state: loops, schedulers, callbacks, data position; plain types only
               manifest.json      size and checksum of each of these

It is written beside, as ``.step-100.unfinished``, and renamed; what is removed is renamed first. So what a killed run leaves behind has a
hidden name, and the next run of the same folder clears it away. One that turns out to be damaged is renamed ``step-100.damaged``
and kept. Under other strategies a checkpoint is one file, ``step-100``.
"""

import os
import re
import shutil
from pathlib import Path

from lightning_3d.checkpoint.manifest import MANIFEST_FILE, missing

TRAINER_FILE = "trainer.pt"
_STEP = re.compile(r"step-(\d+)")
_LEFT_BEHIND = re.compile(r"\.step-\d+\.(unfinished|removed)")


def step_folder(root: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(root) / f"step-{step}"


def is_whole(path: str | Path) -> bool:
    """Whether this is a checkpoint that was written to its end, and nothing is missing or cut off since; contents are not read."""
    path = Path(path)
    return path.is_file() or (is_checkpoint(path) and missing(path) is None)


def is_checkpoint(path: str | Path) -> bool:
    """Whether this is a folder of ours, perhaps with files missing."""
    return (Path(path) / MANIFEST_FILE).is_file()


def whole_steps(root: str | Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending; foreign files and folders are passed over."""
    paths = Path(root).iterdir() if Path(root).is_dir() else ()
    return sorted(int(match[1]) for path in paths if (match := _STEP.fullmatch(path.name)) and is_whole(path))


def latest_checkpoint(root: str | Path, before: str | Path | None = None) -> Path | None:
    """The newest whole checkpoint in a folder, or None; on request the newest of those older than another."""
    match = _STEP.fullmatch(Path(before).name) if before else None
    steps = [step for step in whole_steps(root) if match is None or step < int(match[1])]
    return step_folder(root, steps[-1]) if steps else None


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin(folder: Path) -> Path:
    """An empty place to write a checkpoint to, whatever an earlier try has left there."""
    place = unfinished(folder)
    _delete(place)
    place.mkdir(parents=True)
    return place


def commit(folder: Path) -> None:
    """Make the finished checkpoint visible; an older one of the same name gives way only now."""
    old = _set_aside(folder)
    unfinished(folder).rename(folder)
    _sync(folder.parent)
    _delete(old)


def remove(path: str | Path) -> None:
    """Remove a checkpoint; at no moment is part of it taken for a whole one."""
    _delete(_set_aside(Path(path)))


def abandon(folder: Path) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    shutil.rmtree(unfinished(folder), ignore_errors=True)


def set_damaged_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not taken for a whole one again; its new name."""
    aside = folder.with_name(f"{folder.name}.damaged")
    _delete(aside)
    folder.rename(aside)
    return aside


def clear_leftovers(root: str | Path) -> None:
    """Remove what killed runs left of unfinished saves and removals."""
    for path in list(Path(root).iterdir()) if Path(root).is_dir() else ():
        if _LEFT_BEHIND.fullmatch(path.name):
            _delete(path)


def _set_aside(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}.removed")
    if path.exists():
        _delete(hidden)
        path.rename(hidden)
    return hidden


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the new name is on disk, not only in the page cache
    finally:
        os.close(handle)
