"""Plain text, a document a file, and .jsonl, a document a line; both also compressed, as .gz or .zst.

A .jsonl can be cut in the middle: a line belongs to the piece in which it begins. What is compressed has to be read from its
beginning, so it is one piece. From a file that breaks off, the documents before the break are kept; of a .zst, which is unpacked a
megabyte at a time, all but the last megabyte of them.
"""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from typing import Any

from lightning_3d.data.prepare.records import Bad, Item, Piece, is_unicode, reason_for

BOM = b"\xef\xbb\xbf"
BREAKS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class TextFile:
    """A file that is one document, as it is but for a byte order mark."""

    path: str

    def stamp(self) -> list[Any]:
        """Path, size and time of the last change."""
        return file_stamp(self.path)

    def pieces(self, nbytes: int) -> list[Piece]:
        """Return one piece."""
        size = os.path.getsize(self.path)
        return [Piece(self, 0, size, size)]

    def read(self, piece: Piece, text_field: str) -> Iterator[Item]:
        """Yield the file's text."""
        try:
            with opened(self.path) as (_, file):
                data = file.read().removeprefix(BOM)
            yield data.decode(), piece.nbytes
        except UnicodeDecodeError as error:
            yield Bad("not_utf8", self.path, "byte", error.start, error.reason), piece.nbytes
        except BREAKS as error:
            yield Bad("broken_file", self.path, "byte", 0, reason_for(error, self.path)), piece.nbytes


@dataclass(frozen=True)
class JsonLines:
    """A file with a JSON object a line."""

    path: str

    def stamp(self) -> list[Any]:
        """Path, size and time of the last change."""
        return file_stamp(self.path)

    @property
    def compressed(self) -> bool:
        """Whether it can be read from its beginning only."""
        return not self.path.endswith(".jsonl")

    def pieces(self, nbytes: int) -> list[Piece]:
        """Cut by bytes, if it is not compressed; an empty file is a piece, too."""
        size = os.path.getsize(self.path)
        step = max(size, 1) if self.compressed else nbytes
        return [Piece(self, begin, min(begin + step, size), min(step, size - begin)) for begin in range(0, max(size, 1), step)]

    def read(self, piece: Piece, text_field: str) -> Iterator[Item]:
        """Yield the texts of the lines that begin in the piece; empty lines are nothing."""
        number, since, taken = 0, 0, 0
        try:
            with opened(self.path) as (raw, file):
                since = place = taken = _begin_line(file, piece.begin)
                end = sys.maxsize if self.compressed else piece.end
                while place < end and (line := file.readline()):
                    number += 1
                    place += len(line)
                    if not line.strip():
                        continue
                    found = _text_in(line if place > len(line) else line.removeprefix(BOM), text_field)
                    before, taken = taken, raw.tell() if self.compressed else place
                    yield found if isinstance(found, str) else Bad(found[0], self.path, "line", number, found[1], since), taken - before
        except BREAKS as error:
            yield Bad("broken_file", self.path, "line", number + 1, reason_for(error, self.path), since), 0


def file_stamp(path: str) -> list[Any]:
    """Return path, size and time of the last change."""
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]


@contextmanager
def opened(path: str) -> Iterator[tuple[BufferedIOBase, BufferedIOBase]]:
    """Open a file: its own bytes, which tell how far the reading got, and what is in it."""
    with ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        if path.endswith(".gz"):
            yield raw, stack.enter_context(gzip.GzipFile(fileobj=raw))
        elif path.endswith(".zst"):
            import pyarrow

            stream = pyarrow.CompressedInputStream(raw, "zstd")
            yield raw, stack.enter_context(BufferedReader(stream, 1 << 16))
        else:
            yield raw, raw


def _begin_line(file: BufferedIOBase, begin: int) -> int:
    """Go to the first line that begins at byte `begin` or after."""
    if begin == 0:
        return 0
    file.seek(begin - 1)
    file.readline()  # the rest of a line that began before; only its newline if it ended there
    return file.tell()


def _text_in(line: bytes, text_field: str) -> str | tuple[str, str]:
    """Return the text in a line, or what kind of bad it is and why."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return "not_utf8", f"{error.reason} at byte {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return "not_json", str(error)
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "no_text", f'no text in "{text_field}"' if isinstance(record, dict) else "not an object"
    return text if is_unicode(text) else ("not_utf8", "half a surrogate pair")
