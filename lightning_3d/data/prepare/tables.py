"""Parquet files and data sets of the `datasets` library: tables with a column of text.

Parquet is cut by row groups and read a batch at a time; a data set written by `save_to_disk` is mapped and cut by rows; any other that
`load_dataset` knows, by name on the hub or as a folder, is streamed, each of its files being a piece.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_3d.data.prepare.files import file_stamp
from lightning_3d.data.prepare.records import Bad, Item, Piece, even_pieces, is_unicode, reason_for
from lightning_3d.errors import ConfigError

BATCH_ROWS = 256


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file."""

    path: str

    def stamp(self) -> list[Any]:
        """Path, size and time of the last change."""
        return file_stamp(self.path)

    def pieces(self, nbytes: int) -> list[Piece]:
        """Cut by row groups; a file whose footer is broken is one piece, and reading it says why."""
        from pyarrow import ArrowException, parquet

        try:
            groups = parquet.read_metadata(self.path).num_row_groups
        except (ArrowException, OSError) as error:
            reason_for(error, self.path)
            groups = 1
        return even_pieces(self, groups, os.path.getsize(self.path), nbytes)

    def read(self, piece: Piece, text_field: str) -> Iterator[Item]:
        """Yield the texts of the piece's row groups; of a broken group, those before the break."""
        from pyarrow import ArrowException, parquet

        try:
            file = parquet.ParquetFile(self.path)
        except (ArrowException, OSError) as error:
            yield Bad("broken_file", self.path, "row", 1, reason_for(error, self.path)), piece.nbytes
            return
        with file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            rows = sum(sizes[piece.begin : piece.end])
            if text_field not in file.schema_arrow.names:
                yield _no_column(self.path, sum(sizes[: piece.begin]) + 1, text_field, rows), piece.nbytes
                return
            first = sum(sizes[: piece.begin])
            for group in range(piece.begin, piece.end):
                row, end = sum(sizes[:group]), sum(sizes[: group + 1])
                try:
                    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[text_field]):
                        yield from _texts(batch.column(0), self.path, row + 1, _share(piece.nbytes, row - first, batch.num_rows, rows))
                        row += batch.num_rows
                except (ArrowException, OSError) as error:
                    yield _broken(error, self.path, row, end), 0


@dataclass(frozen=True)
class SavedDataset:
    """A folder written by `Dataset.save_to_disk`, or a split of one written by `DatasetDict.save_to_disk`."""

    path: str
    split: str

    def stamp(self) -> list[Any]:
        """The name, the library's own fingerprint and the number of rows."""
        data = _saved(self)
        return [self.path, self.split, data._fingerprint, len(data)]

    def pieces(self, nbytes: int) -> list[Piece]:
        """Cut by rows."""
        data = _saved(self)
        return even_pieces(self, len(data), data.data.nbytes, nbytes)

    def read(self, piece: Piece, text_field: str) -> Iterator[Item]:
        """Yield the texts of the piece's rows."""
        from pyarrow import ArrowException

        data = _saved(self)
        if text_field not in data.column_names:
            yield _no_column(self.path, piece.begin + 1, text_field, piece.end - piece.begin), piece.nbytes
            return
        data = data.select_columns([text_field]).with_format("arrow")
        rows = piece.end - piece.begin
        for begin in range(0, rows, BATCH_ROWS):
            first, end = piece.begin + begin, piece.begin + min(begin + BATCH_ROWS, rows)
            try:
                column = data[first:end].column(0)
            except (ArrowException, OSError) as error:
                yield _broken(error, self.path, first, end), 0
            else:
                yield from _texts(column, self.path, first + 1, _share(piece.nbytes, begin, end - first, rows))


@dataclass(frozen=True)
class StreamedDataset:
    """A data set that `load_dataset` knows, by name or as a folder."""

    path: str
    split: str
    config: str | None

    def stamp(self) -> list[Any]:
        """The name and the library's hash of what it resolves to."""
        builder = _builder(self)
        return [self.path, self.split, builder.hash, builder.config_id]

    def pieces(self, nbytes: int) -> list[Piece]:
        """A piece for each of the data set's files, of `nbytes` where their size is not known."""
        count = _streamed(self).num_shards
        size = _builder(self).info.dataset_size
        return [Piece(self, number, number + 1, size // count if size else nbytes) for number in range(count)]

    def read(self, piece: Piece, text_field: str) -> Iterator[Item]:
        """Yield the texts of one file.

        Raises:
            ConfigError: the stream broke off; a broken file of a local folder ends as a bad record.
        """
        data, name, row = _streamed(self), f"{self.path} ({self.split}, file {piece.begin + 1})", 0
        try:
            for record in data.shard(num_shards=data.num_shards, index=piece.begin):
                row += 1
                text = _checked(record.get(text_field), name, row, text_field)
                yield text, len(text) if isinstance(text, str) else 0
        except (ValueError, EOFError) as error:  # what parsers raise; arrow's errors are ValueErrors
            yield Bad("broken_file", name, "row", row + 1, reason_for(error, name)), 0
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(f"inputs: {name} broke off after row {row}: {text}: give the same command again to go on") from None


def _share(nbytes: int, begin: int, count: int, rows: int) -> int:
    """Return the bytes of `count` of the rows, so that those of all of them are `nbytes`."""
    return nbytes * (begin + count) // rows - nbytes * begin // rows


def _texts(column: Any, path: str, first_row: int, nbytes: int) -> Iterator[Item]:
    """Yield the texts of a column of a batch; its bytes are counted with the first."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # arrow checks no strings when it reads them
        values = [_decoded(value) for value in column]
    for row, value in enumerate(values, first_row):
        yield _checked(value, path, row, "the column"), nbytes if row == first_row else 0


def _decoded(value: Any) -> str | bytes | None:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return bytes(value.as_buffer())


def _checked(value: Any, path: str, row: int, text_field: str) -> str | Bad:
    """Return a value if it is text; bytes are what could not be decoded, or a column that is not text."""
    if isinstance(value, str):
        return value if is_unicode(value) else Bad("not_utf8", path, "row", row, "half a surrogate pair")
    if isinstance(value, bytes):
        return Bad("not_utf8", path, "row", row, "bytes that are not text")
    return Bad("no_text", path, "row", row, f"{text_field} holds {type(value).__name__}")


def _broken(error: Exception, path: str, row: int, end: int) -> Bad:
    """Return what is said of the rows after `row` up to `end`, which could not be read."""
    return Bad("broken_file", path, "row", row + 1, reason_for(error, path), count=max(1, end - row))


def _no_column(path: str, row: int, text_field: str, rows: int) -> Bad:
    return Bad("no_text", path, "row", row, f'no column "{text_field}"', count=rows)


@lru_cache(maxsize=64)
def _saved(source: SavedDataset) -> Any:
    """Open it once a process.

    Raises:
        ConfigError: it cannot be opened, or has no such split.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(source.path)
    except Exception as error:
        raise ConfigError(f"inputs: {source.path} is not a whole data set of `save_to_disk`: {_first_line(error)}") from None
    if isinstance(data, DatasetDict):
        if source.split not in data:
            raise ConfigError(f"split: {source.path} has no {source.split!r}, but {', '.join(data)}: name one of them")
        return data[source.split]
    return data


@lru_cache(maxsize=64)
def _builder(source: StreamedDataset) -> Any:
    """Resolve the name once a process.

    Raises:
        ConfigError: there is no such data set, or no way to it.
    """
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(source.path, source.config)
    except Exception as error:
        text = f"inputs: {source.path} is neither a file nor a data set that can be reached: {_first_line(error)}"
        raise ConfigError(text) from None


@lru_cache(maxsize=64)
def _streamed(source: StreamedDataset) -> Any:
    """Open the stream once a process.

    Raises:
        ConfigError: there is no such split.
    """
    try:
        return _builder(source).as_streaming_dataset(split=source.split)
    except ValueError as error:
        raise ConfigError(f"split: {source.path} has no {source.split!r}: {_first_line(error)}") from None


def forget_opened() -> None:
    """Look at data sets anew: they may have changed since the last call."""
    for function in (_saved, _builder, _streamed):
        function.cache_clear()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
