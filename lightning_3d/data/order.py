"""The order of samples as a function: position in the endless stream -> sample id, in O(1) memory.

An index array costs 8 bytes a sample and seconds to shuffle (10^8 samples: 0.8 GB in every process). Here each epoch is a
keyed permutation of range(num_samples): a Feistel network over a grid of a x b >= num_samples cells, with a ~ b ~ sqrt(num_samples).
Each round adds to one coordinate a hash of the other, which can be undone, so that the whole is one-to-one. Values past the
end walk on until they fall inside; there are fewer than b of them, so that walks are rare.

Source: Black and Rogaway, Ciphers with arbitrary finite domains (2002), generalised Feistel and cycle walking;
the hash is the finaliser of Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
"""

from math import isqrt

import numpy as np
from jaxtyping import Int64, UInt64

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def sample_ids(positions: Int64[np.ndarray, "n"], num_samples: int, seed: int) -> Int64[np.ndarray, "n"]:
    """Map positions in the endless stream of samples to sample ids: every id once an epoch, each epoch in a new order."""
    epochs, indices = np.divmod(positions, num_samples)
    keys = _mix(_mix(np.full(len(positions), seed & _MASK, np.uint64)) + epochs.astype(np.uint64))
    ids = _permute(indices.astype(np.uint64), keys, num_samples)
    outside = ids >= num_samples
    while outside.any():
        ids[outside] = _permute(ids[outside], keys[outside], num_samples)
        outside = ids >= num_samples
    return ids.astype(np.int64)


def _permute(values: UInt64[np.ndarray, "n"], keys: UInt64[np.ndarray, "n"], num_samples: int) -> UInt64[np.ndarray, "n"]:
    """Permute the cells 0..a*b-1 of the grid, a permutation for each key."""
    a = np.uint64(isqrt(num_samples - 1) + 1)
    b = np.uint64(-(-num_samples // int(a)))
    row, column = np.divmod(values, b)
    for number in range(0, ROUNDS, 2):
        row = (row + _hash(column, keys, number) % a) % a
        column = (column + _hash(row, keys, number + 1) % b) % b
    return row * b + column


def _hash(values: UInt64[np.ndarray, "n"], keys: UInt64[np.ndarray, "n"], number: int) -> UInt64[np.ndarray, "n"]:
    """Return the round's random function of the values."""
    return _mix(_mix(values + np.uint64(GOLDEN * (number + 1) & _MASK)) ^ keys)


def _mix(values: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """Hash 64 bits to 64 bits, one to one (arithmetic modulo 2^64 is meant)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
