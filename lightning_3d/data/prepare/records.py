"""What readers of every format hand to `prepare`: texts, and what stands in place of one that cannot be had.

A reader yields (text or Bad, bytes of input it took). It never raises for what is wrong inside a file; a file that cannot be opened
is another matter, and ends the work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning_3d.errors import ConfigError

KINDS = {
    "not_utf8": "not UTF-8",
    "not_json": "not JSON",
    "no_text": "no text",
    "broken_file": "broken file",
}


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used: why, and where it stands.

    Lines are counted from byte `since`, where the reading began: how many lines came before is found out only for the few that are shown.
    """

    kind: str
    path: str
    unit: str  # "line", "row" or "byte"
    number: int
    reason: str
    since: int = 0
    count: int = 1


Item = tuple[str | Bad, int]


@runtime_checkable
class Source(Protocol):
    """One input, of any format."""

    @property
    def path(self) -> str:
        """The file, or the data set's name."""

    def stamp(self) -> list[Any]:
        """What tells this input from another, or from itself before a change."""

    def pieces(self, nbytes: int) -> list["Piece"]:
        """Cut the input, where it can be cut, into pieces of about `nbytes`."""

    def read(self, piece: "Piece", text_field: str) -> Iterator[Item]:
        """Yield the documents that begin in a piece."""


@dataclass(frozen=True)
class Piece:
    """A part of an input that one process reads: bytes, row groups, rows or files `begin` to `end`, about `nbytes` in all."""

    source: Source
    begin: int
    end: int
    nbytes: int

    def read(self, text_field: str) -> Iterator[Item]:
        """Yield the documents that begin in this piece."""
        return self.source.read(self, text_field)


def even_pieces(source: Source, units: int, size: int, nbytes: int) -> list[Piece]:
    """Cut `units` row groups or rows of `size` bytes in all into pieces of about `nbytes`."""
    count = max(1, min(units, -(-size // nbytes)))
    edges = [number * units // count for number in range(count + 1)]
    shares = [size * edge // max(units, 1) for edge in edges[:-1]] + [size]
    return [Piece(source, edges[n], edges[n + 1], shares[n + 1] - shares[n]) for n in range(count)]


def is_unicode(text: str) -> bool:
    r"""Tell whether UTF-8 can write the text: JSON's "\ud800", half a character, gets past its parser."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def reason_for(error: Exception, path: str) -> str:
    """Return what is wrong with the bytes of a file, in a few words.

    Raises:
        ConfigError: it is the operating system that refuses to read them.
    """
    if isinstance(error, OSError) and error.errno:
        raise ConfigError(f"inputs: {path} cannot be read: {error.strerror}") from None
    return " ".join(str(error).split())[:200] or type(error).__name__


class LineCounter:
    """Counts the lines before places in files; ascending places of a file cost one pass over it."""

    def __init__(self) -> None:
        self._reached: dict[str, tuple[int, int]] = {}

    def before(self, path: str, place: int) -> int:
        """Return the number of lines that end before byte `place`."""
        begin, lines = self._reached.get(path, (0, 0))
        if begin > place:
            begin, lines = 0, 0
        with open(path, "rb") as file:
            file.seek(begin)
            for start in range(begin, place, 1 << 24):
                lines += file.read(min(1 << 24, place - start)).count(b"\n")
        self._reached[path] = (place, lines)
        return lines

    def describe(self, bad: Bad) -> str:
        """Return "books.jsonl, line 7: not JSON (Expecting value)"."""
        number = bad.number + (self.before(bad.path, bad.since) if bad.since else 0)
        return f"{bad.path}, {bad.unit} {number}: {KINDS[bad.kind]} ({bad.reason})"
