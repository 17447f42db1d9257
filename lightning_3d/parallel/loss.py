"""Cross-entropy over a vocabulary that is cut over tp: no rank ever holds a row of all logits.

Per token two numbers cross the ranks: the log-sum-exp of each rank's logits and the target's logit, in one collective.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lightning_3d.model.loss import chunked_token_losses
from lightning_3d.parallel.tensor import TensorParallel, gather
from lightning_3d.placement import local_range


class _VocabParallelLosses(torch.autograd.Function):
    """Per token: the negative log-likelihood, and the log-sum-exp of its logits.

    Shapes: logits (B, S, V/tp), the last parts of the vocabulary may be short or empty; results (B, S).
    Placement: Shard(2) over tp -> replicated over tp.
    Communication: all-gather, tp, of 2 numbers a token.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "B S V/tp"], labels: Int[Tensor, "B S"], start: int, group: dist.ProcessGroup
    ) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
        wide = _at_least_float32(logits)
        index = labels - start
        mine = (index >= 0) & (index < wide.shape[-1])
        index = index.where(mine, 0).unsqueeze(-1)
        own = wide.logsumexp(-1)  # -inf of no logits
        target = wide.gather(-1, index).squeeze(-1) * mine if wide.shape[-1] else torch.zeros_like(own)
        lses, targets = gather(torch.stack((own, target)), group).unbind(1)
        lse, target = lses.logsumexp(0), targets.sum(0)
        valid = labels >= 0
        ctx.save_for_backward(logits, lse, index, mine & valid, valid)
        return (lse - target) * valid, lse * valid

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, nll_grad: Float[Tensor, "B S"], lse_grad: Float[Tensor, "B S"]) -> tuple[Tensor, None, None, None]:
        logits, lse, index, mine, valid = ctx.saved_tensors
        grad = (_at_least_float32(logits) - lse.unsqueeze(-1)).exp_()
        grad *= ((nll_grad + lse_grad) * valid).unsqueeze(-1)
        if grad.shape[-1]:
            grad.scatter_add_(-1, index, -(nll_grad * mine).unsqueeze(-1))
        return grad.to(logits.dtype), None, None, None


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def vocab_parallel_token_losses(
    logits: Float[Tensor, "B S V/tp"], labels: Int[Tensor, "B S"], vocab_size: int, tp: TensorParallel
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Per token: the negative log-likelihood, and the log-sum-exp of its logits; 0 where the label is -100."""
    start, _ = local_range(vocab_size, tp.size, tp.index)
    assert logits.shape[-1] == local_range(vocab_size, tp.size, tp.index)[1] - start
    return _VocabParallelLosses.apply(logits, labels, start, tp.group)


def vocab_parallel_chunked_losses(
    hidden: Float[Tensor, "B S D"],
    weight: Float[Tensor, "V/tp D"],
    labels: Int[Tensor, "B S"],
    chunks: int,
    vocab_size: int,
    tp: TensorParallel,
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Per token the same, from the head's input and weight; logits are there for 1/chunks of the tokens and 1/tp of the vocabulary at once.

    Shapes: hidden (B, S, D), weight (V/tp, D), results (B, S).
    Placement: the weight Shard(0) over tp -> replicated over tp.
    Communication: all-gather, tp, of 2 numbers a token, once for all chunks.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    def join(own: Float[Tensor, "T"], target: Float[Tensor, "T"]) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
        lses, targets = gather(torch.stack((own, target)), tp.group).unbind(1)
        return lses.logsumexp(0), targets.sum(0)

    start, _ = local_range(vocab_size, tp.size, tp.index)
    return chunked_token_losses(hidden, weight, labels, chunks, start=start, join=join)


def vocab_parallel_argmax(logits: Float[Tensor, "*batch V/tp"], vocab_size: int, tp: TensorParallel) -> Int[Tensor, "*batch"]:
    """The id of the largest logit.

    Shapes: (..., V/tp) -> (...).
    Placement: Shard(2) over tp -> replicated over tp.
    Communication: all-reduce (max) and all-reduce (min), tp, of 1 number a token each.
    Source: this project.
    """
    start, end = local_range(vocab_size, tp.size, tp.index)
    top = logits.amax(-1) if end > start else logits.new_full(logits.shape[:-1], -torch.inf)
    best = top.clone()
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=tp.group)
    ids = logits.argmax(-1) + start if end > start else torch.zeros_like(top, dtype=torch.int64)
    ids = ids.where(top == best, vocab_size)  # of equal ones the lowest, as argmax does
    dist.all_reduce(ids, op=dist.ReduceOp.MIN, group=tp.group)
    return ids
