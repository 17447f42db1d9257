"""What stands at each position: the endless stream of training samples, a pure function of (weights, seed, position).

The stream asks `Blend` which set a position belongs to and the how-manieth of that set's samples it is, and `sample_ids` which sample that
is: the set's own keyed permutation, a new one for each pass. So a set smaller than its share gives all its samples, freshly
shuffled, before it repeats one, and whoever reads which part of the stream changes nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from lightning_3d.data.blend import Blend
from lightning_3d.data.order import sample_ids

Windows = Int64[np.ndarray, "n window"]


@runtime_checkable
class Samples(Protocol):
    """A set of samples, such as a Nanoset."""

    @property
    def folder(self) -> Path | str:
        """Its name in messages."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer, where it is known."""

    def __len__(self) -> int: ...

    def windows(self, ids: Int64[np.ndarray, "n"]) -> Windows:
        """Samples by id, `sequence_length` + 1 tokens each; ids past the end give no targets."""

    def positions(self, ids: Int64[np.ndarray, "n"]) -> Windows:
        """The place of each of these tokens in its document."""

    def fingerprint(self) -> dict[str, Any]:
        """Tell this set from another, wherever it lies."""


class Stream:
    """Samples of several sets by position, shuffled.

    Args:
        sets: all of one `sequence_length`.
        blend: their shares.
        seeds: of the order of each set.
        first: how many samples of each set an earlier stream has given already; this one goes on behind them.
    """

    def __init__(self, sets: Sequence[Samples], blend: Blend, seeds: Sequence[int], first: Sequence[int] | None = None) -> None:
        assert len(sets) == len(blend.quotas) == len(seeds)
        self.sets = list(sets)
        self.blend = blend
        self.seeds = list(seeds)
        self.first = list(first) if first is not None else [0] * len(self.sets)

    def place(self, positions: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """The set at each position, and the sample's id in it."""
        sets, ordinals = self.blend(positions)
        ids = np.empty_like(ordinals)
        for number, members in enumerate(self.sets):
            if (mine := sets == number).any():
                ids[mine] = sample_ids(ordinals[mine] + self.first[number], len(members), self.seeds[number])
        return sets, ids


class InOrder:
    """The first `num_samples` samples of one set, one after the other; past them come ids without targets."""

    def __init__(self, samples: Samples, num_samples: int) -> None:
        self.sets = [samples]
        self.num_samples = num_samples

    def place(self, positions: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """The set at each position (0), and the sample's id in it."""
        return np.zeros_like(positions), np.where(positions < self.num_samples, positions, len(self.sets[0]))
