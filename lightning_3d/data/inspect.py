"""What is in a Nanoset, for a person who is about to spend GPUs on it: `python -m lightning_3d inspect DATA`.

Nothing here is read whole: of more than LIMIT documents, the lengths are those of BLOCKS runs of documents, evenly spaced (runs, since
single ones would touch as many pages of the index as there are), and the text is that of a few windows.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.shards import Shard
from lightning_3d.data.tokenizer import TextTokenizer, load_tokenizer
from lightning_3d.errors import ConfigError

LIMIT = 1 << 20  # documents whose lengths are all read
BLOCKS = 1 << 10
WINDOW = 256  # tokens of a sample where the user says nothing
BORDER = "▌"  # before a document's first token


def inspect(data: list[str], *, samples: int = 3, sequence_length: int | None = None, tokenizer: str | None = None, seed: int = 0) -> None:
    """Show what is in Nanosets: sizes, tokenizer, lengths of documents, and some text with the borders of its documents.

    Args:
        data: folders written by `prepare` or by datatrove, or folders of such folders (train, validation).
        samples: windows of text to show of each.
        sequence_length: tokens of a window; 256, or all that there are.
        tokenizer: a tokenizer.json or a folder with a tokenizer, where the one that the files name is not found.
        seed: chooses the windows.

    Raises:
        ConfigError: a folder or the tokenizer cannot be read, a number is out of range, or sequence_length is longer than the data.
    """
    if samples < 0 or seed < 0:
        raise ConfigError(f"samples is {samples} and seed is {seed}: give at least 0")
    if sequence_length is not None and sequence_length < 1:
        raise ConfigError(f"sequence_length is {sequence_length}: give at least 1")
    given = load_tokenizer(tokenizer) if tokenizer else None
    folders = [folder for name in data for folder in _folders(Path(name))]
    sets = [Nanoset(folder, sequence_length or 1) for folder in folders]
    console = Console()
    for nanoset in sets:
        window = sequence_length or min(WINDOW, nanoset.num_tokens)
        console.print(_report(nanoset, given or _own_tokenizer(nanoset), samples, window, seed))


def _folders(folder: Path) -> list[Path]:
    """Return the folder itself, or those in it that hold shards (train, validation)."""
    if folder.is_dir() and not any(folder.glob("*.ds")):
        return sorted({path.parent for path in folder.glob("*/*.ds")}) or [folder]
    return [folder]


def _own_tokenizer(nanoset: Nanoset) -> TextTokenizer | None:
    """Load the tokenizer that the files name, if it is here."""
    path = nanoset.tokenizer_path
    try:
        return load_tokenizer(str(path)) if path else None
    except ConfigError:
        return None


def _report(nanoset: Nanoset, tokenizer: TextTokenizer | None, samples: int, window: int, seed: int) -> RenderableType:
    lengths = sample_lengths(nanoset.shards)
    parts: list[RenderableType] = [_facts(nanoset, tokenizer), _statistics(nanoset, lengths), histogram(lengths)]
    generator = np.random.default_rng(seed)
    if samples and tokenizer is None:
        parts.append(Text("token ids, since the tokenizer is not found: give its path with --tokenizer to see text", "yellow"))
    places = max(1, nanoset.num_tokens - window)
    begins = generator.choice(places, min(samples, places), replace=False)
    for begin in sorted(begins.tolist()):
        parts += [Rule(f"tokens {begin:,} to {begin + window:,}", style="dim"), _sample(nanoset.shards, begin, window, tokenizer)]
    return Panel(Group(*parts), title=str(nanoset.folder), title_align="left")


def _facts(nanoset: Nanoset, tokenizer: TextTokenizer | None) -> Table:
    """What the files and the summary of `prepare` say."""
    shards, summary = nanoset.shards, nanoset.summary
    names = sorted({shard.tokenizer or "not named" for shard in shards})
    found = "found" if tokenizer else "not found here"
    nbytes = nanoset.num_tokens * nanoset.token_nbytes + 8 * nanoset.num_documents
    table = Table.grid(padding=(0, 2))
    rows = {
        "files": f"{len(shards):,}: {shards[0].path.name}" + (f" to {shards[-1].path.name}" if len(shards) > 1 else ""),
        "documents": f"{nanoset.num_documents:,}",
        "tokens": f"{nanoset.num_tokens:,}",
        "bytes": f"{nbytes:,}: {nanoset.token_nbytes} a token and 8 a document",
        "tokenizer": f"{', '.join(names)} ({found})",
        "vocabulary": _vocabulary(nanoset, tokenizer),
        "end of document": _end(nanoset, tokenizer),
    }
    shown = {"documents", "tokens", "tokenizer", "vocab_size", "eos_token_id"}
    rows |= {key.replace("_", " "): _plain(value) for key, value in summary.items() if key not in shown}
    for key, value in rows.items():
        table.add_row(Text(key, "bold"), Text(value))
    return table


def _plain(value: Any) -> str:
    """Return a value of the summary on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _vocabulary(nanoset: Nanoset, tokenizer: TextTokenizer | None) -> str:
    """Its size, and whether the first tokens of the first files are in it."""
    size = nanoset.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    largest = max(int(shard.tokens()[: 1 << 16].max(initial=0)) for shard in nanoset.shards[:16])
    text = f"{size:,} ids, the largest seen is {largest:,}" if size else f"not known; the largest id seen is {largest:,}"
    if tokenizer and largest >= tokenizer.vocab_size:
        text += f"; {tokenizer.name} has only {tokenizer.vocab_size:,}: IT IS NOT THE TOKENIZER OF THESE FILES"
    return text


def _end(nanoset: Nanoset, tokenizer: TextTokenizer | None) -> str:
    """The end-of-document token, and whether documents do end with it."""
    ends = np.concatenate([_last_tokens(shard) for shard in nanoset.shards[:16]])
    known = [nanoset.summary.get("eos_token_id"), tokenizer.eos_token_id if tokenizer else None]
    eos = next((eos for eos in known if eos is not None), None)
    if eos is None:
        eos = int(np.bincount(ends).argmax()) if len(ends) else 0
    name = f" {tokenizer.backend.id_to_token(eos)}" if tokenizer else ""
    return f"id {eos}{name}, the last of {np.mean(ends == eos) if len(ends) else 0:.1%} of the first {len(ends):,} documents"


def _last_tokens(shard: Shard) -> Int64[np.ndarray, "docs"]:
    """Return the last token of each of the first documents."""
    ends = shard.document_ends()[:1024].astype(np.int64)
    return shard.tokens()[ends[ends > 0] - 1].astype(np.int64)


def sample_lengths(shards: list[Shard]) -> Int64[np.ndarray, "docs"]:
    """Return the tokens of each document; of more than LIMIT documents, of evenly spaced runs of them."""
    firsts = [0, *accumulate(shard.num_documents for shard in shards)]
    if firsts[-1] <= LIMIT:
        return np.concatenate([_lengths(shard, 0, shard.num_documents) for shard in shards])
    run = LIMIT // BLOCKS
    parts = []
    for begin in np.linspace(0, firsts[-1] - run, BLOCKS).astype(int).tolist():
        number = bisect_right(firsts, begin) - 1
        parts.append(_lengths(shards[number], begin - firsts[number], run))
    return np.concatenate(parts)


def _lengths(shard: Shard, begin: int, count: int) -> Int64[np.ndarray, "docs"]:
    """Return the tokens of documents begin to begin + count of one shard, or to its end."""
    ends = shard.document_ends()
    before = ends[begin - 1 : begin].astype(np.int64) if begin else np.zeros(1, np.int64)
    return np.diff(np.concatenate([before, ends[begin : begin + count].astype(np.int64)]))


def _statistics(nanoset: Nanoset, lengths: Int64[np.ndarray, "docs"]) -> Text:
    """The lengths in one line; the mean is always that of all documents."""
    names = ["shortest", "10 %", "median", "90 %", "99 %", "longest"]
    values = np.percentile(lengths, [0, 10, 50, 90, 99, 100]) if len(lengths) else np.zeros(6)
    text = f"tokens a document: mean {nanoset.num_tokens / max(1, nanoset.num_documents):,.1f}, "
    text += ", ".join(f"{name} {value:,.0f}" for name, value in zip(names, values, strict=True))
    if len(lengths) < nanoset.num_documents:
        text += f" (of {len(lengths):,} documents, evenly taken from all {nanoset.num_documents:,})"
    return Text("\n" + text)


def histogram(lengths: Int64[np.ndarray, "docs"]) -> Table:
    """Return a table with a bar for each doubling of the length, and the share of documents and of tokens."""
    table = Table("tokens", "documents", "", "share of tokens", box=None, padding=(0, 2), header_style="bold")
    bins = np.ceil(np.log2(lengths + 1)).astype(int)  # 0 | 1 | 2-3 | 4-7 | ...
    documents, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
    used = np.flatnonzero(documents)
    for bin_ in range(used.min(), used.max() + 1) if len(used) else ():
        low, high = (1 << bin_) >> 1, max(0, (1 << bin_) - 1)
        label = f"{low:,}" if low >= high else f"{low:,}-{high:,}"
        share = tokens[bin_] / max(1, tokens.sum())
        table.add_row(label, f"{documents[bin_]:,}", Bar(documents.max(), 0, documents[bin_], width=40), f"{share:.1%}")
    for column in (0, 1, 3):
        table.columns[column].justify = "right"
    return table


def _sample(shards: list[Shard], begin: int, window: int, tokenizer: TextTokenizer | None) -> Text:
    """Return a window as text, document after document."""
    text = Text()
    for number, (ids, whole) in enumerate(pieces(shards, begin, window)):
        text.append("\n" if number else "")
        text.append(*(BORDER, "bold red") if whole else ("… ",))
        text.append(tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False) if tokenizer else " ".join(map(str, ids.tolist())))
    return text


def pieces(shards: list[Shard], begin: int, window: int) -> Iterator[tuple[Int64[np.ndarray, "T"], bool]]:
    """Yield the parts of documents in a window of the token stream, each with whether it is from its document's first token on."""
    firsts = [0, *accumulate(shard.num_tokens for shard in shards)]
    end = min(begin + window, firsts[-1])
    while begin < end:
        number = bisect_right(firsts, begin) - 1
        shard, offset = shards[number], begin - firsts[number]
        ends = shard.document_ends()
        document = int(np.searchsorted(ends, offset, side="right"))
        stop = min(int(ends[document]), offset + end - begin)
        yield shard.tokens()[offset:stop].astype(np.int64), offset == (int(ends[document - 1]) if document else 0)
        begin += stop - offset
