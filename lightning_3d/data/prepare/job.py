"""Shards of work, and how one is done: read, tokenised and written by one process, without a word to the others."""

import errno
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from lightning_3d.data.order import sample_ids
from lightning_3d.data.prepare.processes import in_processes
from lightning_3d.data.prepare.records import Bad, Item, LineCounter, Piece, Source
from lightning_3d.data.prepare.report import Bar, Tally, totals
from lightning_3d.data.prepare.resume import Output
from lightning_3d.data.shards import ShardWriter, token_nbytes_for
from lightning_3d.data.tokenizer import TextTokenizer
from lightning_3d.errors import ConfigError

ENCODE_NCHARS = 1 << 20  # text given to the tokenizer at once: enough for its threads, little memory


@dataclass(frozen=True)
class Task:
    """A shard of work: its number in the names of files, what to read, and a digest of all that decides the bytes written."""

    number: str
    pieces: list[Piece]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of input, about."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Job:
    """What a process must know to write a shard."""

    tokenizer: TextTokenizer
    append_eos: bool
    text_field: str
    validation_fraction: float
    seed: int | None
    strict: bool
    output: Output

    def settings(self) -> dict[str, Any]:
        """Return what decides the bytes written, besides the inputs."""
        return {
            "tokenizer": self.tokenizer.digest(),
            "eos_token_id": self.tokenizer.eos_token_id if self.append_eos else None,
            "text_field": self.text_field,
            "validation_fraction": self.validation_fraction,
            "shuffle_seed": self.seed,
        }

    def tasks(self, shards: list[list[Piece]], stamps: dict[Source, list[Any]]) -> list[Task]:
        """Return the task of writing each shard; `stamps` tell the inputs from others."""
        width = max(5, len(str(len(shards) - 1)))  # names are sorted as text
        settings = [self.tokenizer.name, self.settings()]
        parts = [[(stamps[piece.source], piece.begin, piece.end) for piece in pieces] for pieces in shards]
        return [Task(f"{number:0{width}d}", pieces, digest([*settings, parts[number]])) for number, pieces in enumerate(shards)]

    def name(self, task: Task) -> str:
        """Return the name of a shard's file, after datatrove."""
        return f"{task.number}_{'unshuffled' if self.seed is None else 'shuffled'}.ds"

    def run(self, tasks: list[Task], num_workers: int, progress: bool) -> Tally:
        """Write all shards that are not finished, and return what there is in all of them."""
        finished = self.output.keep_finished({task.number: (task.digest, self.name(task)) for task in tasks}, self.strict)
        todo = [task for task in tasks if task.number not in finished]
        total = sum(task.nbytes for task in tasks)
        try:
            with Bar(total, total - sum(task.nbytes for task in todo), progress) as bar:
                for counts in in_processes(self.write_shard, todo, min(num_workers, len(todo))):
                    bar.advance(counts)
        except BaseException:
            self.output.sweep_temporary()  # of processes that were ended
            raise
        return totals(self.output.read_note(task.number)[1] for task in tasks)

    def write_shard(self, task: Task) -> Iterator[Counter[str]]:
        """Tokenise a shard's documents into a file of each folder, telling now and then what was done.

        Raises:
            ConfigError: there is no room for it; in strict work, a bad record.
        """
        tally = Tally()
        with writing(self.output.folders["train"]):
            with ExitStack() as stack:
                writers: dict[str, ShardWriter] = {}
                for items in _batched(item for piece in task.pieces for item in piece.read(self.text_field)):
                    before = tally.counts.copy()
                    for split, texts in self._sort(items, tally).items():
                        if split not in writers:
                            writers[split] = stack.enter_context(self._writer(split, task))
                        self._write(writers[split], split, texts, tally)
                    tally.counts["progress"] = min(tally.counts["nbytes"], task.nbytes)
                    yield tally.counts - before
            del tally.counts["progress"]
            self.output.write_note(task.number, task.digest, tally)
        yield Counter(progress=task.nbytes - min(tally.counts["nbytes"], task.nbytes))

    def _sort(self, items: list[Item], tally: Tally) -> dict[str, list[str]]:
        """Count what was read, and return the texts by the folder that they belong to."""
        texts: dict[str, list[str]] = {}
        for found, nbytes in items:
            tally.counts["nbytes"] += nbytes
            if isinstance(found, str):
                texts.setdefault(self._split(found), []).append(found)
            elif self.strict:
                raise ConfigError(f"inputs: {LineCounter().describe(found)}: mend it, or set strict to false to leave such records out")
            else:
                tally.drop(found)
        return texts

    def _write(self, writer: ShardWriter, split: str, texts: list[str], tally: Tally) -> None:
        """Tokenise some texts into a shard."""
        ids, lengths = self.tokenizer.encode(texts, self.append_eos)
        tally.counts.update({"empty": len(texts) - len(lengths), f"{split}_documents": len(lengths), f"{split}_tokens": len(ids)})
        writer.extend(ids, lengths)

    def _writer(self, split: str, task: Task) -> ShardWriter:
        path = self.output.partial(split) / self.name(task)
        order = None if self.seed is None else _Order(f"{self.seed} {task.number} {split}")
        return ShardWriter(path, self.tokenizer.name, token_nbytes_for(self.tokenizer.vocab_size), order)

    def _split(self, text: str) -> str:
        """Return the folder that a document belongs to, wherever and however often it stands."""
        if not self.validation_fraction:
            return "train"
        return "validation" if _hash(text) < self.validation_fraction * 2.0**64 else "train"


@dataclass(frozen=True)
class _Order:
    """An order of the documents of one shard."""

    key: str

    def __call__(self, num_documents: int) -> Int64[np.ndarray, "docs"]:
        return sample_ids(np.arange(num_documents), num_documents, _hash(self.key))


def _hash(text: str) -> int:
    """Return 64 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _batched(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield lists of items with about ENCODE_NCHARS of text together."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += 100 if isinstance(item[0], Bad) else len(item[0])
        if size >= ENCODE_NCHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Take errors of the operating system for those of the output: what reads inputs has its own words for them.

    Raises:
        ConfigError: in place of such an error.
    """
    try:
        yield
    except OSError as error:
        if not error.errno:
            raise
        text = f"output: {error.filename or folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(f"{text}: make room, and the same command goes on with the shards that are not finished") from None
        raise ConfigError(f"{text}: choose a folder that can be written") from None


def digest(value: Any) -> str:
    """Return a hash of what JSON can write."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
