"""Text to Nanosets, on all cores: `python -m lightning_3d prepare INPUT... --tokenizer T --output DIR`.

Each shard of the work is read, tokenised and written by one process, without a word to the others. Nothing appears
under its name before it is whole: everything is written to `<folder>.partial` beside it, which is renamed at the end with a
summary in it (nanoset.json) that also tells what it was made from, so that the same call again finds it done.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_3d.data.nanoset import SUMMARY
from lightning_3d.data.shards import ShardWriter, token_nbytes_for
from lightning_3d.data.sources import Piece, cut_into_shards, find_files
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
    shard_nbytes: int = 64 << 20,
    num_workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Tokenise text files into a Nanoset, or into two with held-out documents; done already, it does nothing.

    Args:
        inputs: text files (a document each), .jsonl files (a document a line), or patterns such as "books/*.jsonl".
        tokenizer: a tokenizer.json, or a folder with a tokenizer.
        output: folder to write; with validation_fraction its subfolders train and validation.
        validation_fraction: share of documents held out, chosen by a hash of their text, so that duplicates stay together.
        append_eos: end each document with the tokenizer's end-of-document token.
        eos_token: that token, where the tokenizer does not name it.
        text_field: key of the text in a .jsonl line.
        shard_nbytes: bytes of input per shard.
        num_workers: processes; default: one a core.
        overwrite: replace a Nanoset that was made from other inputs or settings.
        progress: show a progress bar.

    Returns:
        The summary of each folder written: {"train": {...}, "validation": {...}}, or only "train".

    Raises:
        ConfigError: an input, the tokenizer or a setting cannot be used, or `output` holds something else.
    """
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction is {validation_fraction}: give a share from 0 up to, not including, 1")
    if shard_nbytes < 1:
        raise ConfigError(f"shard_nbytes is {shard_nbytes}: give at least 1")
    files = find_files(inputs)
    loaded = load_tokenizer(tokenizer, eos_token)
    if append_eos and loaded.eos_token_id is None:
        raise ConfigError(f"eos_token: {tokenizer} names no end-of-document token: name one of its tokens, or set append_eos to false")
    root = Path(output)
    folders = {"train": root / "train", "validation": root / "validation"} if validation_fraction else {"train": root}
    partial = {split: _partial(folder) for split, folder in folders.items()}
    job = Job(tokenizer, loaded.digest(), eos_token, append_eos, text_field, validation_fraction, partial)
    made_from = _made_from(job, files, loaded, shard_nbytes)
    if done := _already_done(folders, made_from, overwrite):
        return done
    counts = job.run(cut_into_shards(files, shard_nbytes), num_workers or os.cpu_count() or 1, progress)
    return {split: _finish(folder, split, counts, made_from, loaded) for split, folder in folders.items()}


@dataclass(frozen=True)
class Job:
    """What a process must know to write a shard."""

    tokenizer: str
    tokenizer_digest: str
    eos_token: str | None
    append_eos: bool
    text_field: str
    validation_fraction: float
    folders: dict[str, Path]

    def run(self, shards: list[list[Piece]], num_workers: int, progress: bool) -> Counter[str]:
        """Write all shards into the folders, begun anew, and return the sums of their counts."""
        for folder in self.folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        counts: Counter[str] = Counter()
        columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]}"), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task("", total=sum(piece.end - piece.begin for shard in shards for piece in shard), tokens="")
            for finished in self._shards(shards, min(num_workers, len(shards))):
                counts += finished
                seconds = max(bar.tasks[0].elapsed or 0, 1e-3)
                bar.update(task, completed=counts["nbytes"], tokens=f"{counts['tokens'] / seconds:,.0f} tokens/s")
        return counts

    def _shards(self, shards: list[list[Piece]], num_workers: int) -> Iterator[Counter[str]]:
        """Yield the counts of each shard as it is finished."""
        if num_workers == 1:
            yield from map(self.write_shard, range(len(shards)), shards)
            return
        with ProcessPoolExecutor(num_workers, get_context("spawn"), _use_one_thread) as pool:
            waiting = [pool.submit(self.write_shard, number, pieces) for number, pieces in enumerate(shards)]
            try:
                for future in as_completed(waiting):
                    yield future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the first error ends the work, not the last shard
                raise

    def write_shard(self, number: int, pieces: list[Piece]) -> Counter[str]:
        """Tokenise the documents of some pieces into shard `number` of each folder."""
        tokenizer = _load_once(self.tokenizer, self.eos_token, self.tokenizer_digest)
        end = np.array([tokenizer.eos_token_id] if self.append_eos else [], np.int64)
        counts: Counter[str] = Counter(nbytes=sum(piece.end - piece.begin for piece in pieces))
        writers: dict[str, ShardWriter] = {}
        with ExitStack() as stack:
            for texts in _batched(text for piece in pieces for text in piece.documents(self.text_field)):
                for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
                    if not len(ids):
                        counts["empty"] += 1
                        continue
                    split = self._split(text)
                    if split not in writers:
                        path = self.folders[split] / f"{number:05d}_unshuffled.ds"
                        writers[split] = stack.enter_context(ShardWriter(path, self.tokenizer, token_nbytes_for(tokenizer.vocab_size)))
                    writers[split].append(np.concatenate([ids, end]))
        for split, writer in writers.items():
            counts.update({f"{split}_documents": len(writer.ends), f"{split}_tokens": writer.num_tokens, "tokens": writer.num_tokens})
        return counts

    def _split(self, text: str) -> str:
        """Return the folder that a document belongs to, wherever and however often it stands."""
        if not self.validation_fraction:
            return "train"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return "validation" if int.from_bytes(digest, "little") < self.validation_fraction * 2.0**64 else "train"


@lru_cache(maxsize=1)
def _load_once(path: str, eos_token: str | None, digest: str) -> TextTokenizer:
    """Load the tokenizer once a process; `digest` makes another file under the same name another tokenizer."""
    return load_tokenizer(path, eos_token)


def _use_one_thread() -> None:
    """Stop the tokenizer's own threads in a process that is one of many."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts of about ENCODE_NCHARS together."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_NCHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _made_from(job: Job, files: list[Path], tokenizer: TextTokenizer, shard_nbytes: int) -> dict[str, Any]:
    """Return all that decides the bytes written."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {
        "inputs": hashlib.blake2b(json.dumps(stats).encode(), digest_size=16).hexdigest(),
        "tokenizer": job.tokenizer_digest,
        "eos_token_id": tokenizer.eos_token_id if job.append_eos else None,
        "text_field": job.text_field,
        "validation_fraction": job.validation_fraction,
        "shard_nbytes": shard_nbytes,
    }


def _already_done(folders: dict[str, Path], made_from: dict[str, Any], overwrite: bool) -> dict[str, dict[str, Any]] | None:
    """Return the summaries if all folders were made from the same; refuse to touch what is not ours."""
    summaries = {}
    for split, folder in folders.items():
        if not folder.exists() or not any(folder.iterdir()):
            continue
        if not (folder / SUMMARY).is_file():
            raise ConfigError(f"output: {folder} holds files that `prepare` did not write: choose another folder")
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        other = [key for key, value in made_from.items() if summary["made_from"].get(key) != value]
        if other and not overwrite:
            raise ConfigError(f"output: {folder} was made with other {', '.join(other)}: choose another folder, or set overwrite to true")
        if not other:
            summaries[split] = summary
    return summaries if len(summaries) == len(folders) else None


def _finish(folder: Path, split: str, counts: Counter[str], made_from: dict[str, Any], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Write the summary into the partial folder and give it its name."""
    if not counts[f"{split}_documents"]:
        fix = "give more text, or another validation_fraction" if made_from["validation_fraction"] else "give files with text"
        raise ConfigError(f"inputs: no document is left for {folder}: {fix}")
    summary = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "documents": counts[f"{split}_documents"],
        "tokens": counts[f"{split}_tokens"],
        "empty_documents_dropped": counts["empty"],
        "input_nbytes": counts["nbytes"],
        "made_from": made_from,
    }
    partial = _partial(folder)
    (partial / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return summary
