"""Where documents begin in windows of packed text, as positions that start at 0 with each document.

The ends of documents in files' indexes and the end-of-document tokens in the text both come down to runs: the first place of each, and the
place where its document began, which lies before it where a window begins inside a document.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, Shaped

from lightning_3d.errors import ConfigError

Ends = Shaped[np.ndarray, "docs"]  # an index: where each document of a file ends, uint64
Starts = tuple[Int64[np.ndarray, "starts"], Int64[np.ndarray, "n"]]  # of all documents in some windows, and how many are of each window

_ZERO = np.zeros(1, np.uint64)


def positions_from_eos(windows: Int64[np.ndarray, "n window"], eos_token_id: int) -> Int64[np.ndarray, "n window"]:
    """Return positions that start again after each end-of-document token; a window's first token counts as a document's first."""
    begins = np.empty(windows.shape, np.bool_)
    begins[:, 0] = True
    np.equal(windows[:, :-1], eos_token_id, out=begins[:, 1:])
    firsts = np.flatnonzero(begins)
    return _count(firsts, np.append(firsts, windows.size), np.arange(windows.size)).reshape(windows.shape)


def positions_from_starts(
    starts: Starts, begins: Int64[np.ndarray, "n"], window: int, places: Int64[np.ndarray, "places"]
) -> Int64[np.ndarray, "n window"]:
    """Return positions in windows that begin at tokens `begins`; `places` is 0, 1, 2 ... as far as needed, to be kept between calls."""
    tokens, counts = starts
    size = len(begins) * window
    rows = places[:size:window]
    origins = tokens + (rows - begins).repeat(counts)
    edges = np.empty(len(origins) + 1, np.int64)
    np.maximum(origins, rows.repeat(counts), out=edges[:-1])
    edges[-1] = size
    return _count(origins, edges, places[:size]).reshape(-1, window)


def _count(
    origins: Int64[np.ndarray, "runs"], edges: Int64[np.ndarray, "edges"], places: Int64[np.ndarray, "places"]
) -> Int64[np.ndarray, "places"]:
    """Return the distance of each place from the origin of its run; runs lie between the edges."""
    out = origins.repeat(edges[1:] - edges[:-1])
    return np.subtract(places, out, out=out)


class HeldStarts:
    """Starts of all documents in memory, and which of them each window touches.

    Args:
        indexes: of the files, by their names.
        origins: where each file begins, in tokens from the first file's first.
        begins: where each window begins.
        window: tokens of a window.

    Raises:
        ConfigError: an index does not ascend.
    """

    def __init__(
        self, indexes: Mapping[str, Ends], origins: Int64[np.ndarray, "files"], begins: Int64[np.ndarray, "samples"], window: int
    ) -> None:
        for name, ends in indexes.items():
            if (falls := np.flatnonzero(ends[1:] < ends[:-1])).size:
                raise _falls(name, int(ends[falls[0]]))
        parts = [ends.astype(np.int64) + origin for ends, origin in zip(indexes.values(), origins.tolist(), strict=True)]
        self._starts = np.concatenate([np.zeros(1, np.int64), *parts])
        self._low = self._starts.searchsorted(begins, "right") - 1
        self._counts = self._starts.searchsorted(begins + window) - self._low

    def __call__(self, windows: Int64[np.ndarray, "n"]) -> Starts:
        """Return the starts of the documents that these windows touch."""
        counts = self._counts[windows]
        where = (self._low[windows] + counts - counts.cumsum()).repeat(counts)
        where += np.arange(len(where))
        return self._starts[where], counts


def search_starts(
    indexes: Mapping[int, Ends], name: Callable[[int], str], numbers: Int64[np.ndarray, "n"], spans: Int64[np.ndarray, "2 n"]
) -> Starts:
    """Return the starts, in tokens of their file, of the documents that parts of files touch, by a search in the files' indexes.

    Raises:
        ConfigError: an index does not ascend, here.
    """
    low, high = _search(indexes, numbers, spans)
    counts = high - low + 1
    if (fallen := counts.argmin() if counts.min() < 1 else None) is None:
        parts = []
        for number, first, last in zip(numbers.tolist(), low.tolist(), high.tolist(), strict=True):
            parts += [indexes[number][first - 1 : last]] if first else [_ZERO, indexes[number][:last]]
        starts, stops = np.concatenate(parts).astype(np.int64), counts.cumsum()
        steps = np.diff(starts, append=starts[-1:])
        steps[stops - 1] = 0  # from one part to the next
        if steps.min() >= 0:
            return starts, counts
        fallen = stops.searchsorted(steps.argmin(), "right")
    raise _falls(name(int(numbers[fallen])), int(spans[0, fallen]))


def _search(indexes: Mapping[int, Ends], numbers: Int64[np.ndarray, "n"], spans: Int64[np.ndarray, "2 n"]) -> Int64[np.ndarray, "2 n"]:
    """Return how many documents end before each part begins, and how many before it ends; one search for each file."""
    order = numbers.argsort()
    keys = spans[:, order].astype(np.uint64)  # as the index: numpy would make a copy of all of it
    numbers = numbers[order]
    cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(order)]
    found = np.empty(keys.shape, np.int64)
    for begin, end in pairwise(cuts):
        found[:, order[begin:end]] = indexes[int(numbers[begin])].searchsorted(keys[:, begin:end])
    return found


def _falls(name: str, token: int) -> ConfigError:
    return ConfigError(f"{name} does not ascend near token {token}: it is damaged or of another file; prepare or copy it again")
