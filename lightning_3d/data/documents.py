"""Where documents begin in windows of packed text, as positions that start at 0 with each document.

Both ways, from the ends of documents in a file's index and from the tokens themselves, come down to runs: the first token of each run, and
the place where its document began, which lies before it where a window begins inside a document.
"""

import numpy as np
from jaxtyping import Int64


def positions_from_eos(windows: Int64[np.ndarray, "n window"], eos_token_id: int) -> Int64[np.ndarray, "n window"]:
    """Return positions that start again after each end-of-document token; a window's first token counts as a document's first."""
    begins = np.empty(windows.shape, np.bool_)
    begins[:, 0] = True
    np.equal(windows[:, :-1], eos_token_id, out=begins[:, 1:])
    firsts = np.flatnonzero(begins)
    return positions_of_runs(firsts, firsts, windows.size).reshape(windows.shape)


def positions_of_runs(firsts: Int64[np.ndarray, "runs"], origins: Int64[np.ndarray, "runs"], size: int) -> Int64[np.ndarray, "size"]:
    """Return the distance of each of `size` places from the origin of its run; run i holds the places from firsts[i] to the next run's.

    Raises:
        ValueError: the runs do not follow each other.
    """
    lengths = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=lengths[:-1])
    lengths[-1] = size - firsts[-1]
    positions = np.repeat(origins, lengths)
    return np.subtract(np.arange(size), positions, out=positions)
