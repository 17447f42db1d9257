"""Datasets of the `datasets` library as documents in an order that can be taken up again: map-style ones and streams.

A source gives documents in chunks, each with what it takes to go on behind it. Document d of an epoch belongs to dp coord d mod dp, in the
order of a keyed permutation for a map-style dataset, in the order of the stream for a stream. A stream is read to the end by every
coord: only its texts tell how long it is; what belongs to others is dropped before it is tokenised.
"""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from lightning_3d.data.order import sample_ids
from lightning_3d.errors import ConfigError

CHUNK = 64  # documents that are read, and tokenised, at once
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")

Chunk = tuple[list[Any], int, Any]  # texts of one coord, documents of the epoch read so far, state of the source behind them


class MapStyle:
    """A dataset with a length; in order where seed is None."""

    def __init__(self, dataset: Any, column: str, seed: int | None) -> None:
        self.dataset, self.column, self.seed = dataset, column, seed
        self.fingerprint = {"documents": len(dataset), "column": column, "ends": [str(dataset[at][column])[:40] for at in (0, -1)]}

    def chunks(self, epoch: int, document: int, state: Any, rank: int, replicas: int) -> Iterator[Chunk]:
        """Yield the epoch's documents of one coord behind the first `document` of all coords; the state is always None."""
        total = len(self.dataset)
        while document < total:
            stop = min(total, document + CHUNK * replicas)
            mine = np.arange(document + (rank - document) % replicas, stop, replicas, dtype=np.int64)
            ids = mine if self.seed is None else sample_ids(mine + epoch * total, total, self.seed)
            yield self.dataset[ids.tolist()][self.column] if len(ids) else [], stop, None
            document = stop


class Streamed:
    """A stream, in its own order: `datasets` moves whole files of an epoch after the first, nothing more.

    Chunks are read by `iter`, which knows nothing of DataLoaders: an iterator over examples begins its random draws anew in a worker. The
    library's state does not hold a shuffle buffer's content, so that what stands in one would be lost: such a stream is read again from the
    epoch's beginning, and the documents are skipped.
    """

    def __init__(self, dataset: Any, column: str) -> None:
        self.dataset, self.column = dataset, column
        self.fingerprint = {"documents": "streamed", "column": column, "ends": [str(next(iter(dataset))[column])[:40]]}
        self.replays = _has_buffer(getattr(dataset, "_ex_iterable", None))

    def chunks(self, epoch: int, document: int, state: Any, rank: int, replicas: int) -> Iterator[Chunk]:
        """Yield the epoch's documents of one coord behind the first `document` of all coords; `state` is the library's at that place."""
        skip = document if state is None else 0
        document -= skip
        self.dataset.set_epoch(epoch)
        self.dataset.load_state_dict(state)
        batches = self.dataset.iter(batch_size=CHUNK)
        while (batch := _next(batches, f"the dataset, behind document {document},")) is not None:
            texts = batch[self.column]
            begin, document = document, document + len(texts)
            if document > skip:  # chunks are the same each time, so that one is skipped whole or not at all
                yield texts[(rank - begin) % replicas :: replicas], document, None if self.replays else self.dataset.state_dict()


Source = MapStyle | Streamed


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn what libraries have against a file, of a dozen kinds of error, into one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        raise ConfigError(f"{what} cannot be read: {' '.join(str(cause).split())[:300]}") from error


def _next(iterator: Iterator[Any], what: str) -> Any:
    """Return the next of an iterator that reads, or None."""
    with _reading(what):
        return next(iterator, None)


def _has_buffer(iterable: Any) -> bool:
    """Tell whether a shuffle buffer is among the steps of a stream."""
    inner = [*getattr(iterable, "ex_iterables", []), getattr(iterable, "ex_iterable", None)]
    return "BufferShuffled" in type(iterable).__name__ or any(_has_buffer(step) for step in inner if step is not None)


def open_text(dataset: Any, config: str | None, split: str, streaming: bool, column: str, seed: int | None) -> Source:
    """Open a dataset by name, by files, or as an object of the `datasets` library.

    Raises:
        ConfigError: there is nothing there, it cannot be read, it is empty, or it has no such split or no such column of text.
    """
    loaded = _load(dataset, config, split, streaming)
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ConfigError(f"no split {split!r}: there are {', '.join(loaded)}")
        loaded = loaded[split]
    if not hasattr(loaded, "column_names"):
        raise ConfigError(f"{type(loaded).__name__} is not a dataset of the `datasets` library: give one, or the name of one, or files")
    is_stream = not hasattr(loaded, "__len__")
    if is_stream and loaded is dataset:
        loaded = deepcopy(loaded)  # reading changes it
    loaded = loaded.with_format(None)
    _check_column(loaded, column)
    loaded = loaded.select_columns([column])
    return Streamed(loaded, column) if is_stream else MapStyle(loaded, column, seed)


def _load(dataset: Any, config: str | None, split: str, streaming: bool) -> Any:
    """Return what the `datasets` library makes of a name or of files."""
    names = [dataset] if isinstance(dataset, str) else dataset
    if not isinstance(names, list):
        return dataset
    import datasets

    args: dict[str, Any] = {"split": split, "streaming": streaming}
    with _reading(", ".join(map(str, names))):
        if files := _files(names):
            args |= {"data_files": [str(path) for path in files], "split": "train"}
            builder = BUILDERS[_suffix(files[0])]
            return datasets.load_dataset(builder, **args, **({"sample_by": "document"} if builder == "text" else {}))
        if (Path(names[0]) / "state.json").is_file() or (Path(names[0]) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(names[0])
        return datasets.load_dataset(names[0], config, **args)


def _suffix(path: Path) -> str:
    """Return the kind of file, also where it is compressed."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _files(names: list[str]) -> list[Path]:
    """Return the files that the names are or stand for; none if it is one name of a folder or of a dataset on the hub.

    Raises:
        ConfigError: a name of a file or a pattern fits nothing, or the files are not all of one kind.
    """
    found: list[Path] = []
    for name in names:
        named = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]
        if not named and (len(names) > 1 or glob.has_magic(name) or _suffix(Path(name)) in BUILDERS):
            raise ConfigError(f"{name} names no file: give .jsonl, .parquet or .txt files, or patterns of them")
        found += named
    kinds = {BUILDERS.get(_suffix(path)): path for path in found}
    if None in kinds:
        raise ConfigError(f"{kinds[None]} is none of {', '.join(BUILDERS)} (or one of them compressed): convert it")
    if len(kinds) > 1:
        raise ConfigError(f"files of several kinds: {', '.join(map(str, kinds.values()))}: give files of one kind")
    return found


def _check_column(dataset: Any, column: str) -> None:
    """Look at the first document: is there one, and is it text?"""
    first = _next(iter(dataset), "the dataset")
    if first is None:
        raise ConfigError("the dataset is empty: give one with documents")
    if column not in first:
        raise ConfigError(f"no column {column!r}: there are {', '.join(map(repr, first))}; name the one with the text by text_column")
    if first[column] is not None and not isinstance(first[column], str):
        raise ConfigError(f"column {column!r} holds {type(first[column]).__name__}, not text: name another by text_column")
