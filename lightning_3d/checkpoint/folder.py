"""A checkpoint is a folder; it is there for readers only once it is whole.

    step-100/  .metadata          what is where (torch.distributed.checkpoint; written last)
               __0_0.distcp ...   the ranks' shards
               trainer.pt         Lightning's state: loops, schedulers, callbacks, data position; plain types only

It is written beside under another name and renamed.
"""

import re
import shutil
from pathlib import Path

TRAINER_FILE = "trainer.pt"
_STEP = re.compile(r"step-(\d+)")


def step_folder(root: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(root) / f"step-{step}"


def is_whole(folder: str | Path) -> bool:
    """Whether the folder is a checkpoint that was written to its end."""
    return (Path(folder) / ".metadata").is_file() and (Path(folder) / TRAINER_FILE).is_file()


def whole_steps(root: str | Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending; foreign folders are passed over."""
    folders = Path(root).iterdir() if Path(root).is_dir() else ()
    return sorted(int(match[1]) for folder in folders if (match := _STEP.fullmatch(folder.name)) and is_whole(folder))


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    steps = whole_steps(root)
    return step_folder(root, steps[-1]) if steps else None


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(f".{folder.name}.unfinished")


def commit(folder: Path) -> None:
    """Make the finished checkpoint visible; an older one of the same name gives way only now."""
    if folder.exists():
        shutil.rmtree(folder)
    unfinished(folder).rename(folder)
