"""Text to Nanosets, on all cores: `python -m lightning_3d prepare INPUT... --tokenizer T --output DIR`.

Each shard of the work is read, tokenised and written by one process, without a word to the others: what is in it depends on the inputs and
settings alone, not on who does it when. What is finished is kept, whatever ends the work (resume.py says how), and the same
command goes on from there; given again after that, it does nothing.

Documents stand in the order of the inputs, or, with `shuffle`, in one drawn from the seed, in two steps: inputs are cut to sixteenths of a
shard, as far as their format allows, and dealt to the shards at random; then the documents of each shard are permuted on disk. So a shard
is a fair mixture of sixteen places of the whole. Neighbours in a file that cannot be cut (.gz, .zst, a stream) stay in one shard.
"""

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from lightning_3d.data.nanoset import SUMMARY
from lightning_3d.data.order import sample_ids
from lightning_3d.data.processes import in_processes
from lightning_3d.data.records import Bad, Item, LineCounter, Piece, Source
from lightning_3d.data.report import Bar, Tally, totals
from lightning_3d.data.resume import Output, Summaries, write_whole
from lightning_3d.data.shards import ShardWriter, token_nbytes_for
from lightning_3d.data.sources import cut_into_shards, find_sources
from lightning_3d.data.tokenizer import TextTokenizer, load_tokenizer
from lightning_3d.errors import ConfigError

ENCODE_NCHARS = 1 << 20  # text given to the tokenizer at once: enough for its threads, little memory


def prepare(
    inputs: list[str],
    tokenizer: str,
    output: str,
    *,
    validation_fraction: float = 0.0,
    append_eos: bool = True,
    eos_token: str | None = None,
    text_field: str = "text",
    split: str = "train",
    dataset_config: str | None = None,
    shuffle: bool = False,
    seed: int = 42,
    strict: bool = False,
    shard_nbytes: int = 64 << 20,
    num_workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Summaries:
    """Tokenise text into a Nanoset, or into two with held-out documents; stopped, it goes on; done already, it does nothing.

    Args:
        inputs: text files (a document each), .jsonl files (a document a line), both also as .gz or .zst, .parquet files, data sets of
            the `datasets` library (a folder, or a name on the hub, streamed), or patterns such as "books/*.jsonl".
        tokenizer: a tokenizer.json, a folder with a tokenizer, or a name on the hub.
        output: folder to write; with validation_fraction its subfolders train and validation.
        validation_fraction: share of documents held out, chosen by a hash of their text, so that duplicates stay together.
        append_eos: end each document with the tokenizer's end-of-document token.
        eos_token: that token, where the tokenizer does not name it.
        text_field: key of the text in a .jsonl line, name of its column in a table.
        split: split to read of data sets that have several.
        dataset_config: configuration to read of data sets on the hub that have several.
        shuffle: mix the documents.
        seed: of the mixing.
        strict: end at the first record that is not UTF-8, has no text or is broken, instead of leaving it out.
        shard_nbytes: bytes of input per shard.
        num_workers: processes; default: one a core.
        overwrite: replace a Nanoset that was made from other inputs or settings.
        progress: show a progress bar.

    Returns:
        The summary of each folder written, {"train": {...}, "validation": {...}} or only "train": what was read, dropped and written.

    Raises:
        ConfigError: an input, the tokenizer or a setting cannot be used, `output` holds something else, or there is no room for it.
    """
    _check(validation_fraction=validation_fraction, shard_nbytes=shard_nbytes, num_workers=num_workers)
    sources = find_sources(inputs, split, dataset_config)
    loaded = load_tokenizer(tokenizer, eos_token)
    if append_eos and loaded.eos_token_id is None:
        raise ConfigError(f"eos_token: {tokenizer} names no end-of-document token: name one of its tokens, or set append_eos to false")
    root = Path(output)
    target = Output({"train": root / "train", "validation": root / "validation"} if validation_fraction else {"train": root})
    job = Job(loaded, append_eos, text_field, validation_fraction, seed if shuffle else None, strict, target)
    stamps = {source: source.stamp() for source in sources}
    made_from = {"inputs": _digest([*stamps.values()]), **job.settings(), "shard_nbytes": shard_nbytes}
    if done := target.already_done(made_from, overwrite):
        if strict:
            _refuse_incomplete(done, root)
        return done
    shards = cut_into_shards(sources, shard_nbytes, job.seed)
    width = max(5, len(str(len(shards) - 1)))
    tasks = [job.task(f"{number:0{width}d}", pieces, stamps) for number, pieces in enumerate(shards)]
    with _writing(root), target.reserved():
        total = job.run(tasks, num_workers or os.cpu_count() or 1, progress)
        return _finish(target, total, made_from, loaded)


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

    def task(self, number: str, pieces: list[Piece], stamps: dict[Source, list[Any]]) -> Task:
        """Return the task of writing these pieces into one shard."""
        parts = [(stamps[piece.source], piece.begin, piece.end) for piece in pieces]
        return Task(number, pieces, _digest([self.tokenizer.name, self.settings(), parts]))

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
        with _writing(self.output.folders["train"]):
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
def _writing(folder: Path) -> Iterator[None]:
    """Errors of the operating system are those of the output: what reads inputs has its own words for them."""
    try:
        yield
    except OSError as error:
        text = f"output: {error.filename or folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(f"{text}: make room, and the same command goes on with the shards that are not finished") from None
        raise ConfigError(f"{text}: choose a folder that can be written") from None


def _check(*, validation_fraction: float, shard_nbytes: int, num_workers: int | None) -> None:
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction is {validation_fraction}: give a share from 0 up to, not including, 1")
    if shard_nbytes < 1:
        raise ConfigError(f"shard_nbytes is {shard_nbytes}: give at least 1")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers}: give at least 1, or leave it out for one a core")


def _refuse_incomplete(done: Summaries, root: Path) -> None:
    """What was left out of a folder is an error where all of the input is asked for."""
    for summary in done.values():
        if bad := summary.get("bad_records"):
            records = sum(count for kind, count in summary["dropped"].items() if kind != "empty")
            raise ConfigError(
                f"strict: {root} was made without {records} records, the first of them {bad[0]}: mend it, or set strict to false"
            )


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _finish(output: Output, total: Tally, made_from: dict[str, Any], tokenizer: TextTokenizer) -> Summaries:
    """Write the summaries into the partial folders and give these their names."""
    figures = total.summary()
    for split, folder in output.folders.items():
        if not total.counts[f"{split}_documents"]:
            fix = "give more text, or another validation_fraction" if made_from["validation_fraction"] else "give files with text"
            why = f" ({figures['bad_records'][0]})" if figures["bad_records"] else ""
            raise ConfigError(f"inputs: no document is left for {folder}{why}: {fix}")
    summaries = {
        split: {
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eos_token_id,
            "documents": total.counts[f"{split}_documents"],
            "tokens": total.counts[f"{split}_tokens"],
            **figures,
            "made_from": made_from,
        }
        for split in output.folders
    }
    for split, summary in summaries.items():
        write_whole(output.partial(split) / SUMMARY, json.dumps(summary, indent=1) + "\n")
    output.name_folders()
    return summaries
