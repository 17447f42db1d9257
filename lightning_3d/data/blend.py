"""Weights over several sets: position in the stream -> (set, how many of that set's samples came before), in O(1).

Drawing sets at random makes the share of a set wander by sqrt(n); a share of 0.1% may be off by a third after 10,000 samples. Here every
prefix of the stream holds each set within one sample of its weight. That is Pfair scheduling on one processor: the k-th sample of a
set with share w belongs to the window of positions [floor(k / w), ceil((k + 1) / w)), and taking the earliest end among the
windows that are open meets them all.

Shares are fractions n / period, so that the schedule repeats and one period of it (6 bytes a position) answers for any position.
Weights with a common denominator of at most MAX_PERIOD (0.7, 0.2, 0.1, or 3 : 2) are exact; others, such as numbers of tokens, are
rounded to multiples of 1 / MAX_PERIOD, which shifts a share by one sample in 2 x MAX_PERIOD at most.

Source: Baruah, Cohen, Plaxton and Varvel, Proportionate progress: a notion of fairness in resource allocation (1996); the
criterion is Tijdeman's, The chairman assignment problem (1980).
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm

import numpy as np
from jaxtyping import Int64, Shaped

from lightning_3d.errors import ConfigError

MAX_PERIOD = 1 << 17


class Blend:
    """The order of sets that weights ask for.

    Raises:
        ConfigError: a weight is negative or no number, all are zero, or one is too small to be told from zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = _quotas(weights)
        self.period = sum(self.quotas)
        self._sets = _schedule(self.quotas)
        self._ordinals = np.empty(self.period, np.uint32)  # of the set's samples within the period
        for number, quota in enumerate(self.quotas):
            self._ordinals[self._sets == number] = np.arange(quota)

    def __call__(self, positions: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """The set at each position, and its ordinal: how many samples of that set stand before it."""
        periods, offsets = np.divmod(positions, self.period)
        sets = self._sets[offsets].astype(np.int64)
        return sets, periods * np.array(self.quotas)[sets] + self._ordinals[offsets]

    def counts(self, position: int) -> list[int]:
        """How many samples of each set stand before a position."""
        periods, offset = divmod(position, self.period)
        within = np.bincount(self._sets[:offset], minlength=len(self.quotas)).tolist()
        return [periods * quota + count for quota, count in zip(self.quotas, within, strict=True)]


def _quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each set in a period."""
    if not weights or not all(isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
        raise ConfigError(f"dataset_weights={list(weights)}: give numbers of at least 0, not all of them 0")
    exact = [Fraction(str(weight)) for weight in weights]  # str: 0.1 means a tenth, not the binary number next to it
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    quotas = [int(share * MAX_PERIOD) for share in shares]
    remainders = [share * MAX_PERIOD - quota for share, quota in zip(shares, quotas, strict=True)]
    for number in sorted(range(len(quotas)), key=lambda n: -remainders[n])[: MAX_PERIOD - sum(quotas)]:
        quotas[number] += 1
    for weight, quota in zip(weights, quotas, strict=True):
        if weight and not quota:
            raise ConfigError(
                f"dataset_weights={list(weights)}: {weight} is less than one sample in {MAX_PERIOD:,}: enlarge it, or set it to 0"
            )
    return quotas


def _schedule(quotas: list[int]) -> Shaped[np.ndarray, "period"]:
    """The set at each position of a period: among the windows that are open, the one that closes first."""
    period = sum(quotas)
    sets = np.empty(period, np.uint16)
    waiting = [(0, -(-period // quota), number, 0) for number, quota in enumerate(quotas) if quota]  # (opens, closes, set, ordinal)
    heapq.heapify(waiting)
    is_open: list[tuple[int, int, int]] = []
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            heapq.heappush(is_open, heapq.heappop(waiting)[1:])
        closes, number, ordinal = heapq.heappop(is_open)
        assert position < closes
        sets[position] = number
        ordinal += 1
        if ordinal < quotas[number]:
            heapq.heappush(waiting, (ordinal * period // quotas[number], -(-(ordinal + 1) * period // quotas[number]), number, ordinal))
    return sets
