"""From the names on the command line to shards of work.

Work is cut by bytes of input, in the middle of a file where its format allows that, so the shards do not depend on how many processes do
the work.
"""

import glob
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lightning_3d.data.order import sample_ids
from lightning_3d.data.prepare.files import JsonLines, TextFile
from lightning_3d.data.prepare.records import Piece, Source
from lightning_3d.data.prepare.tables import ParquetFile, SavedDataset, StreamedDataset, forget_opened
from lightning_3d.data.tokenizer import HUB_NAME
from lightning_3d.errors import ConfigError

SHUFFLED_PIECES = 16  # pieces of a shard when documents are shuffled: each shard is a mixture of about so many places
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".gz", ".zst")  # no name on the hub ends like this


def find_sources(inputs: list[str], split: str = "train", config: str | None = None) -> list[Source]:
    """Return what paths, patterns and names of data sets name, each once, those of a pattern in order of their names.

    Raises:
        ConfigError: there is none, or one of them names nothing.
    """
    if not inputs:
        raise ConfigError("inputs: none given: name text, .jsonl or .parquet files, data sets or patterns of them")
    forget_opened()
    sources: dict[Source, None] = {}
    for name in inputs:
        found = [source for path in sorted(glob.glob(name, recursive=True)) or [name] if (source := _source_at(path, split))]
        if not found and (Path(name).is_dir() or (HUB_NAME.fullmatch(name) and not name.endswith(SUFFIXES))):
            found = [StreamedDataset(name, split, config)]
        if not found:
            raise ConfigError(f"inputs: {name} names no file: give text, .jsonl or .parquet files, data sets or patterns of them")
        sources.update(dict.fromkeys(found))
    return list(sources)


def _source_at(path: str, split: str) -> Source | None:
    """Return the file or saved data set at a path."""
    if Path(path).is_file():
        if path.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            return JsonLines(path)
        return ParquetFile(path) if path.endswith(".parquet") else TextFile(path)
    if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return SavedDataset(path, split)
    return None


def cut_into_shards(sources: Iterable[Source], shard_nbytes: int, seed: int | None = None) -> list[list[Piece]]:
    """Group the sources, cut where they can be, into pieces of about `shard_nbytes` together; mixed, if there is a seed."""
    step = shard_nbytes if seed is None else max(1, shard_nbytes // SHUFFLED_PIECES)
    pieces = [piece for source in sources for piece in source.pieces(step)]
    if seed is not None:
        pieces = [pieces[number] for number in sample_ids(np.arange(len(pieces)), len(pieces), seed)]
    shards: list[list[Piece]] = [[]]
    room = shard_nbytes
    for piece in pieces:
        if room <= 0:
            shards.append([])
            room = shard_nbytes
        shards[-1].append(piece)
        room -= piece.nbytes
    return shards
