"""Synthetic tokens: the same in every process, of the stated law and entropy, and learned by a small Llama."""

import subprocess
import sys
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.synthetic import EOS, EOS_SHARE, NOISE, SyntheticTokens
from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.model.loss import token_losses


@given(
    ids=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    seed=st.integers(0, 1 << 63),
    vocab_size=st.sampled_from([2, 3, 65, 513, 1026, 128256]),
    sequence_length=st.integers(1, 300),
)
def test_a_sample_depends_on_its_id_alone(ids: list[int], seed: int, vocab_size: int, sequence_length: int) -> None:
    data = SyntheticTokens(vocab_size, sequence_length, 100, seed)
    together, positions = data.windows(np.array(ids)), data.positions(np.array(ids))
    assert together.shape == positions.shape == (len(ids), sequence_length + 1)
    assert together.dtype == positions.dtype == np.int64
    assert 0 <= together.min() <= together.max() < vocab_size
    for row, position, sample in zip(together, positions, ids, strict=True):
        alone = SyntheticTokens(vocab_size, sequence_length, 100, seed).windows(np.array([sample]))[0]
        assert alone.tolist() == row.tolist()
        assert position.tolist() == by_hand(row.tolist())


def by_hand(tokens: list[int]) -> list[int]:
    """Places in documents, token by token."""
    places = [0]
    for token in tokens[:-1]:
        places.append(0 if token == EOS else places[-1] + 1)
    return places


def test_golden_tokens() -> None:
    """The samples of a checkpoint's run, whatever the versions of Python and numpy."""
    code = """if True:
        import numpy as np
        from lightning_3d.data.synthetic import SyntheticTokens
        print(SyntheticTokens(32000, 7, 9, seed=5).windows(np.arange(2)).tolist())"""
    shown = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert (
        shown.strip() == "[[11719, 25731, 31435, 20647, 31001, 11347, 18911, 745], [12215, 7999, 14261, 27591, 16989, 17857, 15563, 28459]]"
    )


def test_samples_and_seeds_differ() -> None:
    data, other = SyntheticTokens(1000, 512, 1000), SyntheticTokens(1000, 512, 1000, seed=1)
    rows = {tuple(row) for row in data.windows(np.arange(1000)).tolist()} | {tuple(row) for row in other.windows(np.arange(1000)).tolist()}
    assert len(rows) == 2000
    assert data.fingerprint() != other.fingerprint()


def test_past_the_end() -> None:
    data = SyntheticTokens(100, 8, num_samples=3)
    assert len(data) == 3
    assert data.num_tokens == 27
    windows = data.windows(np.array([2, 3, 1000]))
    assert (windows[0] != IGNORE).all()
    assert (windows[1:] == IGNORE).all()
    assert (data.positions(np.array([3])) == 0).all()


def true_losses(data: SyntheticTokens, windows: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of each target by the chain's own law, read off the data: what follows what most often is the cycle."""
    before, after = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    counts = np.zeros((data.vocab_size, data.vocab_size), int)
    np.add.at(counts, (before, after), 1)
    successor = counts.argmax(1)
    m = data.num_symbols
    symbol = np.where(before == EOS, 1 / m, np.where(after == successor[before], 1 - NOISE + NOISE / m, NOISE / m))
    return -np.log(np.where(after == EOS, EOS_SHARE, (1 - EOS_SHARE) * symbol)).reshape(windows[:, 1:].shape)


@pytest.mark.parametrize("vocab_size", [65, 513, 2000])
def test_the_entropy_is_that_of_the_data(vocab_size: int) -> None:
    data = SyntheticTokens(vocab_size, 1024, 1000)
    windows = data.windows(np.arange(1000))
    losses = true_losses(data, windows)
    assert losses.mean() == pytest.approx(data.entropy_per_token, abs=0.01)
    inside = windows[:, :-1] != EOS
    assert losses[inside].mean() == pytest.approx(data.entropy_within_documents, abs=0.01)
    assert (windows == EOS).mean() == pytest.approx(EOS_SHARE, abs=3e-4)
    used = np.unique(windows[windows != EOS])
    assert len(used) == min(512, vocab_size - 1)
    assert used.max() > vocab_size * 0.75  # in every part of a split vocabulary


def test_a_small_llama_learns_it() -> None:
    """From ln(V) towards the floor in 60 steps, and not below it."""
    torch.manual_seed(0)
    data = SyntheticTokens(vocab_size=65, sequence_length=64, num_samples=10_000)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaStage(LlamaConfig(vocab_size=65, max_position_embeddings=64, **sizes), range(1), first=True, last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        tokens = torch.from_numpy(data.windows(np.arange(16 * step, 16 * step + 16)))
        loss = token_losses(model(tokens[:, :-1]), tokens[:, 1:])[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(log(65), abs=0.3)
    floor = data.entropy_per_token
    assert 0 < floor < 0.5
    assert floor - 0.1 < sum(losses[-10:]) / 10 < floor + 0.3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size": 1}, "synthetic data: vocab_size is 1: give at least 2"),
        ({"sequence_length": 0}, "synthetic data: sequence_length is 0: give at least 1"),
        ({"num_samples": 0}, "synthetic data: num_samples is 0: give at least 1"),
        ({"seed": -1}, "synthetic data: seed is -1: give at least 0"),
    ],
)
def test_bad_settings(keys: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticTokens(**{"vocab_size": 10, "sequence_length": 4, "num_samples": 5, **keys})
