"""`prepare` against `tokenizers.encode_batch` alone, on all cores and over the same documents, by turns.

    python benchmarks/prepare.py [--nbytes 8000000 --repeats 5]

Prints a table and writes benchmarks/results/prepare.json. The text is that of recipes/python_corpus.py with its tokenizer of 2,048 ids,
over again until there is as much as asked for; `encode_batch` has its documents in memory, `prepare` starts its processes, reads .jsonl
and writes shards; target: at least 0.9 of its tokens per second.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from figures import Cost, against_neighbours, shown, spread, write
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from lightning_3d.data.prepare import prepare

ROOT = Path(__file__).parent.parent
TARGET = 0.9


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=8_000_000, help="text to tokenise (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--corpus", type=Path, default=ROOT / "data/python_corpus")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/prepare.json")
    parsed = parser.parse_args(argv)
    subprocess.run([sys.executable, ROOT / "recipes/python_corpus.py", "--output", parsed.corpus], check=True)
    with tempfile.TemporaryDirectory() as name:
        results = compare(Path(name), parsed.corpus, parsed.nbytes, parsed.repeats)
    show(results)
    write(parsed.output, results, {"nbytes": parsed.nbytes, "repeats": parsed.repeats, "cores": os.cpu_count()})


def documents(corpus: Path, nbytes: int) -> Iterator[str]:
    """Yield the corpus's documents over and over, until there is enough; an empty one has no tokens, and is not among them."""
    texts = [json.loads(line)["text"] for line in (corpus / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    size = 0
    for text in cycle(filter(None, texts)):
        yield text
        size += len(text.encode())
        if size >= nbytes:
            return


def compare(folder: Path, corpus: Path, nbytes: int, repeats: int) -> dict[str, Any]:
    """Time both by turns; they must agree on the number of tokens."""
    texts = list(documents(corpus, nbytes))
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer/tokenizer.json"))
    tokens, first = alone(tokenizer, texts)
    encoded, prepared = [first], []
    for number in range(repeats):
        found, cost = ours(folder, corpus, number)
        assert found == tokens + len(texts), (found, tokens, len(texts))  # an end of each document more
        prepared.append(cost)
        encoded.append(alone(tokenizer, texts)[1])
    figures: dict[str, Any] = {"tokens": tokens, "target": TARGET}
    for clock in ("wall_s", "cpu_s"):
        times = {name: [getattr(cost, clock) for cost in costs] for name, costs in (("encode_batch", encoded), ("prepare", prepared))}
        ratios = against_neighbours(times["prepare"], times["encode_batch"])
        figures[f"tokens_per_{clock}"] = {name: spread([tokens / value for value in values]) for name, values in times.items()}
        figures["ratio" if clock == "wall_s" else "cpu_ratio"] = spread([1 / ratio for ratio in ratios])
    return figures


def clocks() -> Cost:
    """The clocks of this process and of its children that have ended."""
    return Cost(time.perf_counter(), sum(os.times()[:4]))


def since(start: Cost) -> Cost:
    end = clocks()
    return Cost(end.wall_s - start.wall_s, end.cpu_s - start.cpu_s)


def alone(tokenizer: Tokenizer, texts: list[str]) -> tuple[int, Cost]:
    """Tokenise in this process, on all cores; counting and dropping the ids is not part of it."""
    start = clocks()
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return sum(map(len, encodings)), since(start)


def ours(folder: Path, corpus: Path, number: int) -> tuple[int, Cost]:
    """Prepare into a new folder, a shard for each core and some to spare."""
    shard_nbytes = (folder / "in.jsonl").stat().st_size // (4 * (os.cpu_count() or 1)) + 1
    start = clocks()
    out = prepare(
        [str(folder / "in.jsonl")], str(corpus / "tokenizer"), str(folder / f"out-{number}"), shard_nbytes=shard_nbytes, progress=False
    )
    return out["train"]["tokens"], since(start)


def show(results: dict[str, Any]) -> None:
    table = Table("", "tokens/s", "tokens/CPU-s", title=f"{results['tokens']:,} tokens, {os.cpu_count()} cores")
    for name in ("encode_batch", "prepare"):
        values = [results[f"tokens_per_{clock}"][name] for clock in ("wall_s", "cpu_s")]
        table.add_row(name, *(f"{value['median']:,.0f} [{value['low']:,.0f}, {value['high']:,.0f}]" for value in values))
    table.add_row("ratio", shown(results["ratio"]), shown(results["cpu_ratio"]))
    table.add_row("target", f">= {TARGET}", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
