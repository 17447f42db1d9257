"""Folders that appear when they are whole, and what of an unfinished one is kept.

Everything is written to `<folder>.partial` beside each folder. A shard of work is finished once a note on it stands in `finished/` in the
first of them: with its counts, and a digest of all that decided its bytes, so that after a change only what is no longer true is made
again. At the end each partial folder gets its summary, the notes go, and the folders get their names. Killed anywhere, the next call
finds either notes to go on from, or summaries and only names to give.
"""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_3d.data.nanoset import SUMMARY
from lightning_3d.data.prepare.records import Bad
from lightning_3d.data.prepare.report import Tally
from lightning_3d.data.shards import Shard
from lightning_3d.errors import ConfigError

Summaries = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Output:
    """The folders to write, by split."""

    folders: dict[str, Path]

    def partial(self, split: str) -> Path:
        """Where the folder is written before it has its name."""
        folder = self.folders[split]
        return folder.with_name(folder.name + ".partial")

    @property
    def _notes(self) -> Path:
        return self.partial("train") / "finished"

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Make the partial folders, and keep other processes away until the end.

        Raises:
            ConfigError: another process is at work, or the folder is not one of ours.
        """
        partial = self.partial("train")
        if partial.exists() and any(partial.iterdir()) and not self._notes.is_dir():
            raise ConfigError(f"output: {partial} holds files that `prepare` did not write: remove it, or choose another folder")
        for split in self.folders:
            self.partial(split).mkdir(parents=True, exist_ok=True)
        self._notes.mkdir(exist_ok=True)
        handle = os.open(self._notes, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output: another process is writing {self.partial('train')}: wait for it, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            os.close(handle)

    def already_done(self, made_from: dict[str, Any], overwrite: bool) -> Summaries | None:
        """Return the summaries if all folders were made from the same, naming those that lack only that.

        Raises:
            ConfigError: a folder holds something else.
        """
        whole = {split: _summary(folder) for split, folder in self.folders.items()}
        ready = {split: _summary(self.partial(split)) for split in self.folders}
        for split, folder in self.folders.items():
            _refuse_foreign(folder, whole[split], made_from, overwrite)
        same = {
            split: next((each for each in (ready[split], whole[split]) if each and not _differing(each, made_from)), None)
            for split in self.folders
        }
        if not all(same.values()):
            return None
        self.name_folders()
        return {split: summary for split, summary in same.items() if summary is not None}

    def name_folders(self) -> None:
        """Give every partial folder with a summary its name; an older folder of that name goes."""
        for split, folder in self.folders.items():
            old = folder.with_name(folder.name + ".replaced")
            shutil.rmtree(old, ignore_errors=True)
            if (self.partial(split) / SUMMARY).is_file():
                shutil.rmtree(self.partial(split) / "finished", ignore_errors=True)
                if folder.exists():
                    folder.rename(old)
                self.partial(split).rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    def write_note(self, number: str, digest: str, tally: Tally) -> None:
        """Say that a shard is finished, with what there is in it."""
        note = {"digest": digest, "counts": tally.counts, "bad": [asdict(bad) for bad in tally.bad]}
        write_whole(self._notes / f"{number}.json", json.dumps(note))

    def read_note(self, number: str) -> tuple[str, Tally]:
        """Return the digest and the tally of a finished shard."""
        note = json.loads((self._notes / f"{number}.json").read_text(encoding="utf-8"))
        return note["digest"], Tally(Counter(note["counts"]), [Bad(**bad) for bad in note["bad"]])

    def keep_finished(self, shards: dict[str, tuple[str, str]], strict: bool) -> set[str]:
        """Return the numbers of the shards (digest, name of the file) that are finished, and remove every file of no such shard."""
        files = {number: self._files_of(number, digest, name, strict) for number, (digest, name) in shards.items()}
        self._sweep(path for paths in files.values() for path in paths)
        return {number for number, paths in files.items() if paths}

    def sweep_temporary(self) -> None:
        """Remove what killed processes were writing."""
        for split in self.folders:
            for path in self.partial(split).glob("**/*.tmp"):
                path.unlink(missing_ok=True)

    def _files_of(self, number: str, digest: str, name: str, strict: bool) -> list[Path]:
        """Return the files of a shard if it is finished and whole, else none."""
        try:
            noted, tally = self.read_note(number)
        except (OSError, ValueError, KeyError, TypeError):
            return []
        paths = [self.partial(split) / name for split in self.folders if tally.counts[f"{split}_documents"]]
        if noted != digest or (strict and tally.bad) or not all(map(_is_whole, paths)):
            return []
        suffixes = ("", ".index", ".metadata")
        return [self._notes / f"{number}.json", *(path.with_name(path.name + suffix) for path in paths for suffix in suffixes)]

    def _sweep(self, kept: Iterable[Path]) -> None:
        kept = set(kept)
        for split in self.folders:
            for path in self.partial(split).rglob("*"):
                if path.is_file() and path not in kept:
                    path.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _is_whole(path: Path) -> bool:
    try:
        Shard.open(path)
    except (ConfigError, OSError):
        return False
    return True


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _differing(summary: dict[str, Any], made_from: dict[str, Any]) -> list[str]:
    """Return the names of what a folder was made from and is no longer."""
    return [key for key, value in made_from.items() if summary["made_from"].get(key) != value]


def _refuse_foreign(folder: Path, summary: dict[str, Any] | None, made_from: dict[str, Any], overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output: {folder} is not a folder: choose another")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if summary is None:
        raise ConfigError(f"output: {folder} holds files that `prepare` did not write: choose another folder")
    if (other := _differing(summary, made_from)) and not overwrite:
        raise ConfigError(f"output: {folder} was made with other {', '.join(other)}: choose another folder, or set overwrite to true")
