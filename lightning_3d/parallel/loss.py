"""Cross-entropy over a vocabulary that is cut over tp: no rank ever holds a row of all logits.

Per token three numbers cross the ranks: the largest logit, the sum of exponentials and the target's logit.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.placement import local_range


class _VocabParallelLosses(torch.autograd.Function):
    """Per token the negative log-likelihood and the log-sum-exp, from this rank's part of the vocabulary.

    Shapes: logits (B, S, V/tp), the last parts of the vocabulary may be short or empty; results (B, S).
    Placement: Shard(2) over tp -> replicated over tp.
    Communication: all-reduce (max) and all-reduce (sum), tp, of 1 and 2 numbers a token; none in the backward.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "B S V/tp"], labels: Int[Tensor, "B S"], start: int, group: dist.ProcessGroup
    ) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = logits.amax(-1) if logits.shape[-1] else logits.new_full(labels.shape, -torch.inf)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        local = labels - start
        mine = (local >= 0) & (local < logits.shape[-1])
        index = local.where(mine, 0).unsqueeze(-1)
        exponentials = (logits - top.unsqueeze(-1)).exp()
        target = logits.gather(-1, index).squeeze(-1) * mine if logits.shape[-1] else torch.zeros_like(top)
        sums = torch.stack((exponentials.sum(-1), target))
        dist.all_reduce(sums, group=group)
        lse = sums[0].log() + top
        valid = labels >= 0
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), index, mine & valid, valid)
        return (lse - sums[1]) * valid, lse * valid

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, mine, valid = ctx.saved_tensors
        nll_grad, lse_grad = grads
        logits_grad = softmax * ((nll_grad + lse_grad) * valid).unsqueeze(-1)
        if softmax.shape[-1]:
            logits_grad.scatter_add_(-1, index, -(nll_grad * mine).unsqueeze(-1))
        return logits_grad, None, None, None


def vocab_parallel_token_losses(
    logits: Float[Tensor, "B S V/tp"], labels: Int[Tensor, "B S"], vocab_size: int, tp: TensorParallel
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Per token: the negative log-likelihood, and the log-sum-exp of its logits; 0 where the label is -100."""
    start, _ = local_range(vocab_size, tp.size, tp.index)
    assert logits.shape[-1] == local_range(vocab_size, tp.size, tp.index)[1] - start
    return _VocabParallelLosses.apply(logits, labels, start, tp.group)


def vocab_parallel_argmax(logits: Float[Tensor, "B S V/tp"], vocab_size: int, tp: TensorParallel) -> Int[Tensor, "B S"]:
    """The id of the largest logit.

    Shapes: (B, S, V/tp) -> (B, S).
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
