"""Attention against the textbook formula, and the refusals of flash_attn."""

import math

import pytest
import torch

from lightning_3d.errors import ConfigError
from lightning_3d.model.attention import Documents, attention_function, check_attention, flash_attn, sdpa
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


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 6, 0, 0, 1, 9, 10]])  # the second row begins inside a document, and one is torn
DOCUMENTS = [(0, 0, 3), (0, 3, 7), (1, 0, 2), (1, 2, 3), (1, 3, 5), (1, 5, 7)]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sdpa_within_documents_is_that_of_each_alone(kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 7, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 7, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours, weight = sdpa(q, k, v, Documents(POSITIONS)), torch.randn_like(q)
    alone = [sdpa(*(x[row : row + 1, begin:end] for x in (q, k, v))) for row, begin, end in DOCUMENTS]
    expected = torch.cat(alone, 1).view_as(q)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
    pairs = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (ours, expected))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_one_document_is_plain_causal_attention():
    q, k, v = (torch.randn(2, 70, 2, 8) for _ in range(3))
    assert torch.equal(sdpa(q, k, v, Documents(torch.arange(70).expand(2, -1) + 3)), sdpa(q, k, v))


def test_documents_as_masks_and_as_borders():
    documents = Documents(POSITIONS)
    assert documents.borders.tolist() == [7 * row + begin for row, begin, _ in DOCUMENTS] + [14]
    assert documents.borders.dtype == torch.int32  # what flash-attn takes
    assert documents.longest == 4
    sees = torch.zeros(2, 1, 7, 7, dtype=torch.bool)
    for row, begin, end in DOCUMENTS:
        sees[row, 0, begin:end, begin:end] = True
    for dtype in (torch.float32, torch.bfloat16):
        mask = documents.mask(dtype)
        assert mask.dtype == dtype
        assert torch.equal(mask, torch.zeros((), dtype=dtype).where(sees.tril(), -math.inf))
        assert documents.mask(dtype) is mask  # one for all layers


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
