"""Rotary embeddings against the formulas of the papers, written here with loops."""

import math

import pytest
import torch

from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.rope import RotaryTables, inverse_frequencies, rotate

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def closed_form(head_size, theta, scaling):
    out = []
    for pair in range(head_size // 2):
        frequency = theta ** (-2 * pair / head_size)
        kind = (scaling or {}).get("rope_type", "default")
        if kind == "linear":
            frequency /= scaling["factor"]
        if kind == "llama3":
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
            if turns < low:
                frequency /= factor
            elif turns < high:
                share = (turns - low) / (high - low)
                frequency = (1 - share) * frequency / factor + share * frequency
        out.append(frequency)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies(scaling, theta):
    ours = inverse_frequencies(32, theta, scaling)
    torch.testing.assert_close(ours.double(), closed_form(32, theta, scaling), rtol=1e-6, atol=0)


def test_llama3_keeps_fast_pairs_to_the_bit_and_divides_slow_ones():
    plain, scaled = inverse_frequencies(32, 5e5, None), inverse_frequencies(32, 5e5, LLAMA3)
    assert torch.equal(scaled[0], plain[0])
    assert torch.equal(scaled[-1], plain[-1] / 8.0)


def test_rotate_turns_each_pair_by_position_times_frequency():
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_theta=100.0)
    cos, sin = RotaryTables(config)(5, torch.device("cpu"))
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    turned = rotate(x, cos, sin)
    for position in range(5):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            a, b = x[0, position, :, pair], x[0, position, :, pair + 4]
            torch.testing.assert_close(turned[0, position, :, pair], a * math.cos(angle) - b * math.sin(angle), rtol=0, atol=1e-5)
            torch.testing.assert_close(turned[0, position, :, pair + 4], b * math.cos(angle) + a * math.sin(angle), rtol=0, atol=1e-5)


def test_given_positions_pick_the_same_turns():
    rope = RotaryTables(LlamaConfig(hidden_size=16, num_attention_heads=2))
    cos, sin = rope(9, torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 5, 6, 7, 8]])
    picked_cos, picked_sin = rope(5, torch.device("cpu"), positions)
    assert torch.equal(picked_cos, cos[positions])
    assert torch.equal(picked_sin, sin[positions])


def test_tables_grow_with_the_sequence_and_are_reused():
    rope = RotaryTables(LlamaConfig(hidden_size=16, num_attention_heads=2))
    cpu = torch.device("cpu")
    short, long, again = rope(3, cpu)[0], rope(7, cpu)[0], rope(3, cpu)[0]
    assert (short.shape[0], long.shape[0], again.shape[0]) == (3, 7, 3)
    assert torch.equal(short, again)
    assert again.data_ptr() == long.data_ptr()


def test_bfloat16_queries_are_turned_in_float32():
    rope = RotaryTables(LlamaConfig(hidden_size=16, num_attention_heads=2))
    tables = rope(300, torch.device("cpu"))
    x = torch.randn(1, 300, 2, 8).bfloat16()
    turned = rotate(x, *tables)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), *tables).bfloat16())
