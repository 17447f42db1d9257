"""The keyed permutation: one to one in every epoch, another order each epoch, and near enough to random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.data.order import sample_ids

SEEDS = st.integers(-(2**63), 2**64 - 1)


def epoch(number: int, num_samples: int, seed: int) -> list[int]:
    return sample_ids(np.arange(number * num_samples, (number + 1) * num_samples), num_samples, seed).tolist()


@given(st.integers(1, 3000), SEEDS, st.integers(0, 10**9))
def test_every_sample_once_an_epoch(num_samples: int, seed: int, number: int) -> None:
    assert sorted(epoch(number, num_samples, seed)) == list(range(num_samples))


@given(st.integers(30, 300), SEEDS)
def test_no_two_epochs_or_seeds_alike(num_samples: int, seed: int) -> None:
    orders = [epoch(number, num_samples, seed) for number in range(5)] + [epoch(0, num_samples, seed ^ 1)]
    assert len({tuple(order) for order in orders}) == 6
    assert list(range(num_samples)) not in orders


@given(st.integers(1, 10**12), SEEDS, st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
def test_a_pure_function_of_the_position(num_samples: int, seed: int, positions: list[int]) -> None:
    together = sample_ids(np.array(positions), num_samples, seed)
    assert together.tolist() == [sample_ids(np.array([position]), num_samples, seed)[0] for position in positions]
    assert ((together >= 0) & (together < num_samples)).all()


@pytest.mark.parametrize("num_samples", [7, 100, 997])
def test_near_enough_to_random(num_samples: int) -> None:
    """Where a sample stands is uniform over epochs: chi-squared of 7 coarse bins, and neighbours do not stay neighbours."""
    epochs = np.array([epoch(number, num_samples, 3) for number in range(700)])
    for column in (0, num_samples // 2, num_samples - 1):
        counts = np.bincount(epochs[:, column] * 7 // num_samples, minlength=7)
        shares = np.bincount(np.arange(num_samples) * 7 // num_samples, minlength=7) / num_samples
        assert ((counts - 700 * shares) ** 2 / (700 * shares)).sum() < 22.5  # 6 degrees of freedom: 0.1 %
    followed = (np.diff(epochs, axis=1) == 1).mean()
    assert followed == pytest.approx(1 / num_samples, rel=0.2, abs=1e-3)


def test_the_order_never_changes() -> None:
    """A run resumed by another version must find the same samples: these were drawn once."""
    assert epoch(0, 10, 42) == [6, 2, 0, 9, 3, 1, 4, 5, 8, 7]
    assert epoch(1, 10, 42) == [2, 5, 6, 4, 9, 1, 3, 0, 8, 7]
    assert sample_ids(np.array([0, 1, 10**12]), 10**9, 42).tolist() == [442385435, 885858478, 783531131]
