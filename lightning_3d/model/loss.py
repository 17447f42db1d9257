"""Cross-entropy token by token, with the log-sum-exp that z-loss needs.

Token losses are not averaged here: the mean is over the unmasked tokens of the *global* batch, which one rank cannot know.

The backward is by hand, because it needs nothing but the logits and one number a token: softmax = exp(logits - lse). PyTorch's
cross_entropy keeps the log-probabilities beside the logits, B x S x V numbers (0.5 GB for 1,024 tokens and V 128,256), and gives no lse;
autograd through logsumexp and gather gives both at 1.4 times the time. This one is as fast as cross_entropy alone.

In chunks the logits themselves are never held either: forward and backward make those of some tokens at a time from the hidden states
and the head's weight, at the price of a fourth product beside the head's three. To take the gradients in the forward would spare it, but
each microbatch in flight would hold a gradient as large as the head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "B S V"], labels: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
        masked = labels == IGNORE_INDEX
        targets = labels.masked_fill(masked, 0).unsqueeze(-1)
        wide = _at_least_float32(logits)
        lse = wide.logsumexp(-1)
        ctx.save_for_backward(logits, lse, targets, masked)
        nll = lse - wide.gather(-1, targets).squeeze(-1)
        return nll.masked_fill_(masked, 0), lse.masked_fill(masked, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nll: Float[Tensor, "B S"], grad_lse: Float[Tensor, "B S"]) -> tuple[Tensor, None]:
        logits, lse, targets, masked = ctx.saved_tensors
        grad_nll, grad_lse = grad_nll.masked_fill(masked, 0), grad_lse.masked_fill(masked, 0)
        grad = (_at_least_float32(logits) - lse.unsqueeze(-1)).exp_()
        grad *= (grad_nll + grad_lse).unsqueeze(-1)
        grad.scatter_add_(-1, targets, -grad_nll.unsqueeze(-1))
        return grad.to(logits.dtype), None


def token_losses(logits: Float[Tensor, "B S V"], labels: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Negative log-likelihood (nats) and log-sum-exp of each token, in float32 or better; both 0, gradient too, where the label is -100."""
    nll, lse = _TokenLosses.apply(logits, labels)
    return nll, lse


Join = Callable[[Float[Tensor, "T"], Float[Tensor, "T"]], tuple[Float[Tensor, "T"], Float[Tensor, "T"]]]


class _ChunkedLosses(torch.autograd.Function):
    """Both losses in one tensor: torch's schedules that split the backward take a function of one output only, and call it twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "T D"],
        weight: Float[Tensor, "V D"],
        labels: Int[Tensor, "T"],
        start: int,
        chunks: int,
        dtype: torch.dtype,
        join: Join,
    ) -> Float[Tensor, "2 T"]:
        index, valid = labels - start, labels != IGNORE_INDEX
        mine = valid if join is _itself else (index >= 0) & (index < weight.shape[0])
        index = index.where(mine, 0).unsqueeze(-1)
        own, target = [], []
        for part, logits in _logits(hidden, weight, chunks, dtype):
            own.append(logits.logsumexp(-1))  # -inf of no logits
            target.append(logits.gather(-1, index[part]).squeeze(-1) if logits.shape[-1] else torch.zeros_like(own[-1]))
        lse, of_target = join(torch.cat(own), torch.cat(target) * mine)
        ctx.save_for_backward(hidden, weight, lse, index, mine, valid)
        ctx.chunks, ctx.dtype = chunks, dtype
        return torch.stack((lse - of_target, lse)).masked_fill_(~valid, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grads: Float[Tensor, "2 T"]) -> tuple[Tensor | None, ...]:
        hidden, weight, lse, index, mine, valid = ctx.saved_tensors
        grad_nll, grad_lse = (grads * valid).unbind()
        of_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        of_hidden = torch.empty_like(hidden)
        narrow = weight.to(ctx.dtype)
        for part, logits in _logits(hidden, weight, ctx.chunks, ctx.dtype):
            logits.sub_(lse[part].unsqueeze(-1)).exp_().mul_((grad_nll + grad_lse)[part].unsqueeze(-1))
            if logits.shape[-1]:
                logits.scatter_add_(-1, index[part], -(grad_nll * mine)[part].unsqueeze(-1))
            grad = logits.to(ctx.dtype)
            of_hidden[part] = grad @ narrow
            if of_weight is not None:
                of_weight += grad.T @ hidden[part].to(ctx.dtype)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, chunks: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The logits of one chunk of tokens after the other, in float32 or better; the caller may overwrite them."""
    narrow, tokens = weight.to(dtype), len(hidden)
    for chunk in range(chunks):
        part = slice(chunk * tokens // chunks, (chunk + 1) * tokens // chunks)
        yield part, _at_least_float32(hidden[part].to(dtype) @ narrow.T)


def _itself(lse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return lse, target


def chunked_token_losses(
    hidden: Float[Tensor, "B S D"],
    weight: Float[Tensor, "V D"],
    labels: Int[Tensor, "B S"],
    chunks: int,
    *,
    start: int = 0,
    join: Join = _itself,
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """`token_losses` of the logits hidden x weight, which are only ever there for 1/chunks of the tokens.

    Args:
        hidden: what the head takes.
        weight: the head's, or the part of the vocabulary that begins at ``start``.
        labels: -100 where there is none.
        chunks: how many; sizes may be uneven.
        start: first token id of the part.
        join: makes of each part's log-sum-exp and logit of the target (0 on other parts) those of the whole vocabulary.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    losses = _ChunkedLosses.apply(hidden.flatten(0, 1), weight, labels.flatten(), start, chunks, dtype, join)
    nll, lse = losses.unflatten(1, labels.shape).unbind()
    return nll, lse


def z_losses(lse: Float[Tensor, "B S"], coefficient: float) -> Float[Tensor, "B S"]:
    """PaLM's auxiliary loss of each token, coefficient x lse^2, which keeps logits from drifting; `lse` is of the true logits."""
    return coefficient * lse.square()


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
