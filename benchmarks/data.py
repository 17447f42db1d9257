"""What it costs to read samples: shuffled windows of a Nanoset against the bare slices of memory maps that they are copied from.

    python benchmarks/data.py [--tokens 64000000] [--samples 100000000] [--repeats 9]

Prints a table and writes benchmarks/results/data.json. One pass over a temporary folder of four files, with documents of about 500 tokens,
in batches of 32 samples of 512 tokens; CPU time a sample. Targets: windows at most 1.3 times the bare slices, with positions in
documents at most 2 times. Positions are measured twice: starts of documents are held in memory up to a size, and searched for
in the files beyond it.

The order is measured over four sets of 25 million samples: seconds until the first batch's samples are known (target: 1), where the order
of all samples as an array takes 0.8 GB and their shuffling seconds; then CPU time a sample, as one of 1 and of 8 replicas.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from figures import against_neighbours, now, shown, since, spread, write
from rich.console import Console
from rich.table import Table

from lightning_3d.data.batches import Batches
from lightning_3d.data.blend import Blend
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.shards import WIDTHS, ShardWriter
from lightning_3d.data.stream import Stream
from lightning_3d.data.synthetic import SyntheticTokens

SEQUENCE, ROWS, FILES, DOCUMENT = 512, 32, 4, 500
WEIGHTS = [123_456_789, 98_765_432, 44_444_444, 17_777_777]
WAYS: dict[str, float | None] = {"windows": 1.3, "windows, positions": 2.0, "windows, positions searched for": None}  # with targets


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64_000_000)
    parser.add_argument("--samples", type=int, default=100_000_000, help="of all sets, for the order")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/data.json")
    parsed = parser.parse_args(argv)
    reads = {f"{8 * nbytes}-bit tokens": measure_reads(parsed.tokens, nbytes, parsed.repeats) for nbytes in WIDTHS}
    order = measure_order(parsed.samples, parsed.tokens // SEQUENCE)
    show_reads(reads)
    show_order(order, parsed.samples)
    setting = {"tokens": parsed.tokens, "files": FILES, "tokens_per_document": DOCUMENT, "sequence_length": SEQUENCE, "rows": ROWS}
    write(parsed.output, {"reads": reads, "order": order}, setting)


def measure_reads(tokens: int, token_nbytes: int, repeats: int) -> dict[str, Any]:
    """Microseconds a sample, and ratios to the bare slices before and after."""
    with TemporaryDirectory() as folder:
        nanoset = Nanoset(write_nanoset(Path(folder), tokens, token_nbytes), SEQUENCE)
        batches = shuffled_batches(nanoset)
        ways = dict(zip(WAYS, ways_of(nanoset, batches), strict=True))
        bare = bare_slices(nanoset, batches)
        for read in (bare, *ways.values()):
            read()  # so that files are mapped, and what is held is built
        bare_s = [cpu_s(bare)]
        ways_s: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(repeats):
            for name, read in ways.items():
                ways_s[name].append(cpu_s(read))
            bare_s.append(cpu_s(bare))
    us = 1e6 / (len(batches) * ROWS)
    rows = {
        name: {"us": spread([us * s for s in way_s]), "ratio": spread(against_neighbours(way_s, bare_s))} for name, way_s in ways_s.items()
    }
    return {"bare slices": {"us": spread([us * s for s in bare_s])}} | rows


def write_nanoset(folder: Path, tokens: int, token_nbytes: int) -> Path:
    generator = np.random.default_rng(0)
    for number in range(FILES):
        with ShardWriter(folder / f"{number:05d}_unshuffled.ds", "tokenizer", token_nbytes) as shard:
            while (left := tokens // FILES - shard.num_tokens) > 0:
                shard.append(generator.integers(0, 1 << 16, min(left, int(generator.integers(1, 2 * DOCUMENT)))))
    return folder


def shuffled_batches(nanoset: Nanoset) -> list[np.ndarray]:
    """Ids of all samples but those over the borders of files, which no single slice could give."""
    ids = np.random.default_rng(1).permutation(len(nanoset) - 1)
    borders = np.cumsum([shard.num_tokens for shard in nanoset.shards])
    first, last = (borders.searchsorted(ids * SEQUENCE + shift, "right") for shift in (0, SEQUENCE))
    ids = ids[first == last]
    return list(ids[: len(ids) // ROWS * ROWS].reshape(-1, ROWS))


def bare_slices(nanoset: Nanoset, batches: list[np.ndarray]) -> Callable[[], None]:
    """Slice and copy, with all else known beforehand."""
    views = [shard.tokens() for shard in nanoset.shards]
    borders = np.cumsum([0, *(shard.num_tokens for shard in nanoset.shards)])
    begins = [ids * SEQUENCE for ids in batches]
    numbers = [borders.searchsorted(each, "right") - 1 for each in begins]
    places = [(number.tolist(), (begin - borders[number]).tolist()) for number, begin in zip(numbers, begins, strict=True)]

    def read() -> None:
        for files, offsets in places:
            out = np.empty((ROWS, SEQUENCE + 1), np.int64)
            for row, number in enumerate(files):
                begin = offsets[row]
                out[row] = views[number][begin : begin + SEQUENCE + 1]

    return read


def ways_of(nanoset: Nanoset, batches: list[np.ndarray]) -> list[Callable[[], None]]:
    """The reads that `WAYS` names."""

    def windows() -> None:
        for ids in batches:
            nanoset.windows(ids)

    def positions() -> None:
        for ids in batches:
            nanoset.windows(ids)
            nanoset.positions(ids)

    return [windows, positions, patch("lightning_3d.data.nanoset.HELD", 0)(positions)]


def cpu_s(read: Callable[[], None]) -> float:
    start = now()
    read()
    return since(start).cpu_s


def measure_order(in_all: int, samples: int) -> dict[str, float]:
    """Seconds to the first batch, for an array of all ids too, and microseconds a sample."""
    start = now()
    sets = [SyntheticTokens(2, SEQUENCE, in_all // len(WEIGHTS)) for _ in WEIGHTS]
    stream = Stream(sets, Blend(WEIGHTS), list(range(len(sets))))
    Batches([stream], rows=ROWS, rank=0, replicas=1).place((0, 0))
    result = {"first_batch_s": since(start).wall_s}
    start = now()
    np.random.default_rng(0).permutation(in_all)
    result["array_s"] = since(start).wall_s
    for replicas in (1, 8):
        batches = Batches([stream], rows=ROWS, rank=0, replicas=replicas)
        start = now()
        for number in range(samples // ROWS):
            batches.place((0, number * batches.stride))
        result[f"us_{replicas}"] = 1e6 * since(start).cpu_s / (samples // ROWS * ROWS)
    return result


def show_order(order: dict[str, float], in_all: int) -> None:
    table = Table("", "", "target", title=f"order of {in_all:,} samples over {len(WEIGHTS)} sets")
    table.add_row("first batch", f"{order['first_batch_s']:.2f} s", "<= 1 s")
    table.add_row("all of it as an array, for comparison", f"{order['array_s']:.2f} s", "")
    table.add_row("a sample, 1 replica", f"{order['us_1']:.2f} us", "")
    table.add_row("a sample, 8 replicas", f"{order['us_8']:.2f} us", "")
    Console(width=120).print(table)


def show_reads(reads: dict[str, Any]) -> None:
    table = Table("", "read", "us a sample", "ratio", "target", title="shuffled reads")
    for width, rows in reads.items():
        for name, row in rows.items():
            ratio = shown(row["ratio"]) if "ratio" in row else "1"
            target = f"<= {WAYS[name]}" if WAYS.get(name) else ""
            table.add_row(width, name, shown(row["us"]), ratio, target)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
