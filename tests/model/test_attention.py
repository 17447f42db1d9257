"""Attention against the textbook formula, and the refusals of flash_attn."""

import math

import pytest
import torch

from lightning_3d.errors import ConfigError
from lightning_3d.model.attention import attention_function, check_attention, flash_attn, sdpa
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage

FLASH = LlamaConfig(33, 32, 40, 1, 4, attn_implementation="flash_attn")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_sdpa_is_the_textbook_formula(heads, kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 7, heads, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 7, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    owner = torch.arange(heads) // (heads // kv_heads)  # query head n reads key/value head n // (N / K)
    scores = torch.einsum("bsnh,btnh->bnst", q, k[:, :, owner]) / math.sqrt(8)
    future = torch.ones(7, 7).triu(1).bool()
    expected = torch.einsum("bnst,btnh->bsnh", scores.masked_fill(future, -math.inf).softmax(-1), v[:, :, owner])
    ours = sdpa(q, k, v)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)), torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_sdpa_is_always_available():
    config = LlamaConfig(33, 32, 40, 1, 4)
    check_attention(config)
    assert attention_function(config) is sdpa


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_flash_attn_without_cuda_is_refused_at_the_check_and_at_construction():
    for build in (check_attention, attention_function, lambda config: LlamaStage(config, range(1), first=True, last=True)):
        with pytest.raises(ConfigError, match=r"attn_implementation: flash_attn needs a CUDA device.*sdpa"):
            build(FLASH)


def test_flash_attn_in_float32_is_refused():
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(ConfigError, match="precision: bf16-mixed"):
        flash_attn(x, x, x)
