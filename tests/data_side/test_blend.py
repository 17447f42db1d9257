"""Shares of sets in every prefix of the stream, and what a set gives before it repeats anything."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.data.blend import MAX_PERIOD, Blend
from lightning_3d.data.order import sample_ids
from lightning_3d.data.stream import Stream
from lightning_3d.data.synthetic import SyntheticTokens
from lightning_3d.errors import ConfigError


def samples(count: int) -> SyntheticTokens:
    return SyntheticTokens(vocab_size=2, sequence_length=1, num_samples=count)


tenths = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


@given(tenths, st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_one_sample_of_its_weight(tenth_weights: list[int], far: int) -> None:
    blend = Blend([weight / 10 for weight in tenth_weights])
    for first in (0, far):
        begin = np.array(blend.counts(first))
        sets, ordinals = blend(np.arange(first, first + 1500))
        counts = np.cumsum(sets[:, None] == np.arange(len(tenth_weights)), axis=0)
        for number, weight in enumerate(tenth_weights):
            share = Fraction(weight, sum(tenth_weights))
            lags = [
                first + row + 1 - Fraction(int(begin[number]) + int(counts[row, number])) / share for row in range(0, 1500, 50) if weight
            ]
            assert all(abs(lag * share) < 1 for lag in lags)
            assert ordinals[sets == number].tolist() == list(range(begin[number], begin[number] + counts[-1, number]))
        assert blend.counts(first + 1500) == (begin + counts[-1]).tolist()


@pytest.mark.parametrize("weights", [[123_456_789, 98_765, 444_444_441, 17_777], [3**0.5, 2**0.5, 1.0]])
def test_weights_without_a_small_denominator_are_rounded(weights: list[float]) -> None:
    blend = Blend(weights)
    assert blend.period == MAX_PERIOD
    errors = np.array(blend.quotas) / blend.period - np.array(weights) / sum(weights)
    assert np.abs(errors).max() < 1 / MAX_PERIOD
    sets, _ = blend(np.arange(20_000))
    lags = (
        np.cumsum(sets[:, None] == np.arange(len(weights)), axis=0) - np.arange(1, 20_001)[:, None] * np.array(blend.quotas) / blend.period
    )
    assert np.abs(lags).max() < 1


def test_exact_weights_stay_exact() -> None:
    assert Blend([0.7, 0.2, 0.1]).quotas == [7, 2, 1]
    assert Blend([1, 3]).quotas == [1, 3]
    assert Blend([0, 5]).quotas == [0, 1]


@given(st.integers(1, 30), st.integers(1, 200), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_a_small_set_gives_all_before_it_repeats_one(small: int, large: int, seed: int) -> None:
    """Half the samples from a set of few: each of its passes is all of it, in another order."""
    stream = Stream([samples(small), samples(large)], Blend([1, 1]), [seed, seed + 1])
    sets, ids = stream.place(np.arange(2 * small * 5))
    passes = ids[sets == 0].reshape(5, small)
    assert all(sorted(row) == list(range(small)) for row in passes.tolist())
    assert small < 8 or len({tuple(row) for row in passes.tolist()}) == 5


def test_a_stream_goes_on_behind_another() -> None:
    whole = Stream([samples(9)], Blend([1]), [3])
    later = Stream([samples(9)], Blend([1]), [3], first=[7])
    assert later.place(np.arange(20))[1].tolist() == whole.place(np.arange(7, 27))[1].tolist()
    assert whole.place(np.arange(20))[1].tolist() == sample_ids(np.arange(20), 9, 3).tolist()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -0.5], r"dataset_weights=\[1\.0, -0\.5\]: give numbers of at least 0, not all of them 0"),
        ([0.0, 0.0], r"dataset_weights=\[0\.0, 0\.0\]: give numbers"),
        ([float("nan"), 1.0], r"dataset_weights=\[nan, 1\.0\]: give numbers"),
        ([1.0, 1e-9], r"dataset_weights=\[1\.0, 1e-09\]: 1e-09 is less than one sample in 131,072"),
    ],
)
def test_bad_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Blend(weights)
