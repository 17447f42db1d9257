"""Text files and what is in them: the documents of plain text (one a file) and of .jsonl (one a line).

Work is cut into shards by bytes of input, a .jsonl in the middle of a file too: a line belongs to the piece in which it begins.
So the shards do not depend on how many processes do the work.
"""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """Bytes begin to end of a file: all of a plain text file, a part of a .jsonl."""

    path: Path
    begin: int
    end: int

    def documents(self, text_field: str) -> Iterator[str]:
        """Yield the texts of the documents that begin in this piece.

        Raises:
            ConfigError: text is not UTF-8, a line is not a JSON object, or it has no text in `text_field`.
        """
        if self.path.suffix == ".jsonl":
            yield from self._lines(text_field)
        else:
            try:
                yield self.path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"inputs: {self.path} is not UTF-8 text ({error.reason} at byte {error.start})") from None

    def _lines(self, text_field: str) -> Iterator[str]:
        with self.path.open("rb") as file:
            if self.begin > 0:
                file.seek(self.begin - 1)
                file.readline()  # the rest of a line that began before; only its newline if it ended there
            while (place := file.tell()) < self.end:
                line = file.readline()
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[text_field]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise ConfigError(f'inputs: {self.path}, line at byte {place}: no JSON object with text in "{text_field}"')
                yield text


def find_files(inputs: list[str]) -> list[Path]:
    """Return the files that paths and patterns name, each once, those of a pattern in order of their names.

    Raises:
        ConfigError: one of them names no file.
    """
    files: dict[Path, None] = {}
    for name in inputs:
        found = [path for path in map(Path, sorted(glob.glob(name, recursive=True)) or [name]) if path.is_file()]
        if not found:
            raise ConfigError(f"inputs: {name} names no file: give text files, .jsonl files or patterns of them")
        files.update(dict.fromkeys(found))
    return list(files)


def cut_into_shards(files: list[Path], shard_nbytes: int) -> list[list[Piece]]:
    """Group the files, cut where they can be, into pieces of about `shard_nbytes` together."""
    shards: list[list[Piece]] = [[]]
    room = shard_nbytes
    for path in files:
        size = path.stat().st_size
        step = shard_nbytes if path.suffix == ".jsonl" else max(size, 1)
        for begin in range(0, max(size, 1), step):  # an empty file is read too, and counted as an empty document
            piece = Piece(path, begin, min(begin + step, size))
            if room <= 0:
                shards.append([])
                room = shard_nbytes
            shards[-1].append(piece)
            room -= piece.end - piece.begin
    return shards
