"""Text to Nanosets, on all cores: `python -m lightning_3d prepare INPUT... --tokenizer T --output DIR`.

Each shard of the work is read, tokenised and written by one process, without a word to the others: what is in it depends on the inputs and
settings alone, not on who does it when. What is finished is kept, whatever ends the work (resume.py says how), and the same
command goes on from there; given again after that, it does nothing.

Documents stand in the order of the inputs, or, with `shuffle`, in one drawn from the seed, in two steps: inputs are cut to sixteenths of a
shard, as far as their format allows, and dealt to the shards at random; then the documents of each shard are permuted on disk. So a shard
is a fair mixture of sixteen places of the whole. Neighbours in a file that cannot be cut (.gz, .zst, a stream) stay in one shard.
"""

import json
import os
from pathlib import Path
from typing import Any

from lightning_3d.data.nanoset import SUMMARY
from lightning_3d.data.prepare.job import Job, digest, writing
from lightning_3d.data.prepare.report import Tally
from lightning_3d.data.prepare.resume import Output, Summaries, write_whole
from lightning_3d.data.prepare.sources import cut_into_shards, find_sources
from lightning_3d.data.tokenizer import TextTokenizer, load_tokenizer
from lightning_3d.errors import ConfigError


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
    loaded = _load(tokenizer, eos_token, append_eos)
    root = Path(output)
    target = Output({"train": root / "train", "validation": root / "validation"} if validation_fraction else {"train": root})
    job = Job(loaded, append_eos, text_field, validation_fraction, seed if shuffle else None, strict, target)
    stamps = {source: source.stamp() for source in sources}
    made_from = {"inputs": digest([*stamps.values()]), **job.settings(), "shard_nbytes": shard_nbytes}
    if done := target.already_done(made_from, overwrite):
        return _complete(done, root) if strict else done
    tasks = job.tasks(cut_into_shards(sources, shard_nbytes, job.seed), stamps)
    with writing(root), target.reserved():
        return _finish(target, job.run(tasks, num_workers or os.cpu_count() or 1, progress), made_from, loaded)


def _load(tokenizer: str, eos_token: str | None, append_eos: bool) -> TextTokenizer:
    loaded = load_tokenizer(tokenizer, eos_token)
    if append_eos and loaded.eos_token_id is None:
        raise ConfigError(f"eos_token: {tokenizer} names no end-of-document token: name one of its tokens, or set append_eos to false")
    return loaded


def _check(*, validation_fraction: float, shard_nbytes: int, num_workers: int | None) -> None:
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction is {validation_fraction}: give a share from 0 up to, not including, 1")
    if shard_nbytes < 1:
        raise ConfigError(f"shard_nbytes is {shard_nbytes}: give at least 1")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers}: give at least 1, or leave it out for one a core")


def _complete(done: Summaries, root: Path) -> Summaries:
    """Return the summaries; what was left out is an error where all of the input is asked for."""
    for summary in done.values():
        if bad := summary.get("bad_records"):
            records = sum(count for kind, count in summary["dropped"].items() if kind != "empty")
            raise ConfigError(
                f"strict: {root} was made without {records} records, the first of them {bad[0]}: mend it, or set strict to false"
            )
    return done


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
