"""Tokens for benchmarks: made, not read; each sample a function of (seed, sample id), and a known loss that no model can beat.

The language is a Markov chain over `num_symbols` ids spread evenly over the vocabulary, so that every part of a split embedding is used.
A random cycle through all symbols says what follows a symbol. At each position, on its own:

    with probability EOS_SHARE     the document ends: id 0; what follows is any symbol
    else with probability NOISE    any symbol
    else                           the symbol after the last one on the cycle

A model learns first which ids occur (the loss falls to about ln(num_symbols) in a few steps), then the cycle, a fact a symbol.
Nothing before the last token helps to predict the next one, so that the entropy is exact.
"""

from math import log

import numpy as np
from jaxtyping import Float64, Int64

from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.order import sample_ids
from lightning_3d.errors import ConfigError

EOS = 0
EOS_SHARE = 1 / 256  # the mean document has 256 tokens, EOS among them
NOISE = 0.05
NUM_SYMBOLS = 512  # few enough to be learned in a short benchmark


class SyntheticTokens:
    """Windows of `sequence_length` + 1 tokens, read like those of a Nanoset; each begins anew, so they share no token.

    Args:
        vocab_size: of the model; ids are 0 (the end of a document) and up to NUM_SYMBOLS others.
        sequence_length: tokens a sample.
        num_samples: of an epoch.
        seed: of the cycle and of all draws.
        first_sample: leave out so many samples: others of the same language, for validation.

    Raises:
        ConfigError: fewer than two ids or tokens, no sample, or a negative seed.
    """

    def __init__(self, vocab_size: int, sequence_length: int, num_samples: int, seed: int = 0, first_sample: int = 0) -> None:
        least = {"vocab_size": (vocab_size, 2), "sequence_length": (sequence_length, 1), "num_samples": (num_samples, 1), "seed": (seed, 0)}
        for key, (value, low) in least.items():
            if value < low:
                raise ConfigError(f"synthetic data: {key} is {value}: give at least {low}")
        self.vocab_size, self.sequence_length, self.num_samples, self.seed = vocab_size, sequence_length, num_samples, seed
        self.first_sample = first_sample
        self.num_symbols = min(NUM_SYMBOLS, vocab_size - 1)
        stride = (vocab_size - 1) // self.num_symbols
        self._cycle = 1 + stride * sample_ids(np.arange(self.num_symbols), self.num_symbols, seed)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def folder(self) -> str:
        """Its name in messages."""
        return f"synthetic data (vocab_size {self.vocab_size}, seed {self.seed})"

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return self.num_samples * (self.sequence_length + 1)

    @property
    def entropy_per_token(self) -> float:
        """Nats: the mean cross entropy of a model that knows the chain, over all tokens."""
        return self._entropy(after_end=EOS_SHARE)

    @property
    def entropy_within_documents(self) -> float:
        """Nats: the same without the first tokens of documents, which are no targets where documents are masked."""
        return self._entropy(after_end=0)

    def _entropy(self, after_end: float) -> float:
        """Whether the document ends, and else which symbol: any one in a share `after_end` of places, else mostly the next one."""
        other = NOISE / self.num_symbols
        successor = 1 - NOISE + other
        symbol = -successor * log(successor) - (self.num_symbols - 1) * other * log(other)
        end = -EOS_SHARE * log(EOS_SHARE) - (1 - EOS_SHARE) * log(1 - EOS_SHARE)
        return end + (1 - EOS_SHARE) * (after_end * log(self.num_symbols) + (1 - after_end) * symbol)

    def windows(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return the windows of these samples; all IGNORE for ids >= len."""
        draws, symbols = self._draws(ids)
        ends = draws < EOS_SHARE
        fresh = draws < EOS_SHARE + (1 - EOS_SHARE) * NOISE  # an end draws a symbol too, which nothing shows
        fresh[:, 0] = True
        fresh[:, 1:] |= ends[:, :-1]
        since = _distance_to_last(fresh)
        begun = np.take_along_axis(symbols, np.arange(since.shape[1]) - since, axis=1)
        tokens = self._cycle[(begun + since) % self.num_symbols]
        tokens[ends] = EOS
        tokens[ids >= self.num_samples] = IGNORE
        return tokens

    def positions(self, ids: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n window"]:
        """Return each token's place in its document, 0 from the window's beginning on; all 0 for ids >= len."""
        begins = np.ones((len(ids), self.sequence_length + 1), bool)
        begins[:, 1:] = (self._draws(ids)[0] < EOS_SHARE)[:, :-1]
        positions = _distance_to_last(begins)
        positions[ids >= self.num_samples] = 0
        return positions

    def fingerprint(self) -> dict[str, int | str]:
        """Tell these samples from others."""
        settings = {"vocab_size": self.vocab_size, "sequence_length": self.sequence_length, "samples": self.num_samples, "seed": self.seed}
        return {"kind": "synthetic", "first_sample": self.first_sample, **settings}

    def _draws(self, ids: Int64[np.ndarray, "n"]) -> tuple[Float64[np.ndarray, "n window"], Int64[np.ndarray, "n window"]]:
        """Return a share in [0, 1) and a symbol for each token; raw bits, which numpy promises not to change."""
        width = self.sequence_length + 1
        rows = [
            np.random.Philox(key=self.seed, counter=[0, 0, sample, 0]).random_raw(2 * width)
            for sample in (ids + self.first_sample).tolist()
        ]
        raw = np.array(rows, np.uint64).reshape(len(ids), 2, width)
        return (raw[:, 0] >> np.uint64(11)) * 2.0**-53, (raw[:, 1] % np.uint64(self.num_symbols)).astype(np.int64)


def _distance_to_last(marks: np.ndarray) -> Int64[np.ndarray, "n window"]:
    """Return how far back the last mark is, in each row; the first of each row is marked."""
    places = np.arange(marks.shape[1])
    return places - np.maximum.accumulate(np.where(marks, places, 0), axis=1)
