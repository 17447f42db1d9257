"""What was read, dropped and written: counted while it happens, shown in a bar, and kept in the summary of each folder."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_3d.data.prepare.records import Bad, LineCounter

SHOWN = 20  # bad records that a summary names


@dataclass
class Tally:
    """Counts, and the first of the bad records."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)

    def drop(self, bad: Bad) -> None:
        """Count a bad record."""
        self.counts[bad.kind] += bad.count
        self.bad = [*self.bad, bad][:SHOWN]

    def add(self, other: "Tally") -> None:
        """Take in what another one counted."""
        self.counts.update(other.counts)
        self.bad = [*self.bad, *other.bad][:SHOWN]

    @property
    def dropped(self) -> dict[str, int]:
        """Records that were left out, by reason."""
        return {kind: self.counts[kind] for kind in DROPPED if self.counts[kind]}

    def summary(self) -> dict[str, Any]:
        """What was read and dropped; line numbers are looked up here."""
        documents = sum(self.dropped.values()) + sum(count for key, count in self.counts.items() if key.endswith("_documents"))
        lines = LineCounter()
        return {
            "read": {"nbytes": self.counts["nbytes"], "documents": documents},
            "dropped": self.dropped,
            "bad_records": [lines.describe(bad) for bad in self.bad],
        }


DROPPED = ("empty", "not_utf8", "not_json", "no_text", "broken_file")


class Bar:
    """A progress bar on the terminal: share of the input, documents and tokens per second, time left."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        rates = TextColumn("{task.fields[rates]}")
        columns = (TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), rates, TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._progress.add_task("", total=total, completed=done, rates="")
        self._done: Counter[str] = Counter()

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, counts: Counter[str]) -> None:
        """Show what was done since the last time."""
        self._done.update(counts)
        seconds = max(self._progress.tasks[0].elapsed or 0, 1e-3)
        documents, tokens = (sum(self._done[f"{split}_{what}"] for split in ("train", "validation")) for what in ("documents", "tokens"))
        rates = f"{documents / seconds:,.0f} documents/s {tokens / seconds:,.0f} tokens/s"
        self._progress.update(self._task, advance=counts["progress"], rates=rates)


def totals(tallies: Iterable[Tally]) -> Tally:
    """Return the sum."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
