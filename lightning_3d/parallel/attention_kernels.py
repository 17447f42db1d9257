"""Attention over one block of keys, with what is needed to put blocks together: the log-sum-exp of each query's scores.

``scaled_dot_product_attention`` does not give it; the fused kernels below it do. Their backward takes the output and the log-sum-exp of the
*whole* row of keys, and then gives this block's share of the gradients. Where there is no fused kernel, the same in plain torch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Mask = Float[Tensor, "B 1 s t"] | None
_ATEN = torch.ops.aten


class Kernel(NamedTuple):
    """(q, k, v, causal, mask) -> (out, lse), and (grad, q, out, lse, k, v, causal, mask) -> gradients of q, k and v; heads are dim 1."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Float[Tensor, "B N s H"], *, masked: bool) -> Kernel:
    """The fastest that there is."""
    if q.device.type == "cpu":
        return Kernel(_cpu_forward, _cpu_backward)
    if q.is_cuda and not masked and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return Kernel(_cuda_forward, _cuda_backward)
    return PLAIN


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _cpu_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    """Not measured on a GPU."""
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _cuda_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Not measured on a GPU; rows are all of one length, and without dropout the random state is not read."""
    unread = torch.empty(2, dtype=torch.int64, device=q.device)
    contiguous = (x.contiguous() for x in (grad, q, k, v, out, lse))
    lengths = (q.shape[2], k.shape[2])
    return _ATEN._scaled_dot_product_flash_attention_backward(*contiguous, None, None, *lengths, 0.0, causal, unread, unread)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, mask)
    out = scores.softmax(-1) @ _wide(v).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), scores.logsumexp(-1).flatten(1, 2)


def _plain_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (k.shape[1], -1)
    wide_q, wide_grad = _wide(q).unflatten(1, heads), _wide(grad).unflatten(1, heads)
    weights = (_scores(q, k, causal, mask) - lse.unflatten(1, heads).unsqueeze(-1)).exp()
    v_grad = (weights.mT @ wide_grad).sum(2)
    inner = wide_grad @ _wide(v).unsqueeze(2).mT - (wide_grad * _wide(out).unflatten(1, heads)).sum(-1, keepdim=True)
    scores_grad = weights * inner * q.shape[-1] ** -0.5
    q_grad = (scores_grad @ _wide(k).unsqueeze(2)).flatten(1, 2)
    return q_grad.to(q.dtype), (scores_grad.mT @ wide_q).sum(2).to(k.dtype), v_grad.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Mask) -> Float[Tensor, "B K groups s t"]:
    scores = _wide(q).unflatten(1, (k.shape[1], -1)) @ _wide(k).unsqueeze(2).mT * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores if mask is None else scores + mask.unsqueeze(2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


PLAIN = Kernel(_plain_forward, _plain_backward)
