"""Ring attention: keys and values travel round the ranks of cp, and each rank adds up what its queries make of every block.

Softmax is put together from its parts: over the keys of one block a kernel gives the output and the log-sum-exp of the scores, and two such
are one by their weights exp(lse). The backward goes round again; a block's gradients travel behind it and are home after the last step.

With the head-tail split no rank is idle. Of a block from an earlier rank all queries see the head chunk and none the tail; of one from a
later rank the queries of the tail chunk see all, and those of the head none: half of the scores either way; the own block is causal.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lightning_3d.parallel.attention_kernels import Mask, kernel_for

# Where attention is not allowed. Finite: a query that sees nothing of a block then weighs exp(-1e30 - lse) = 0, while of
# rows of minus infinity kernels make NaN or, on the CPU, a log-sum-exp of 0.
HIDDEN = -1e30

Sees = Callable[[Tensor, Tensor], Bool[Tensor, "b s t"]]  # (places of queries, places of keys) -> which see which
Arriving = Callable[[], Tensor]  # waits for it


class Pass:
    """Hands tensors to the next rank of the ring, and counts them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.blocks_sent = 0  # of keys and values, since the count was last set to 0

    def on(self, block: Shaped[Tensor, "..."], *, tag: int = 0) -> Arriving:
        """Send a tensor to the next rank; the result waits for the one that comes from the rank before.

        Shapes: any, equal on the ranks.
        Placement: each rank's own -> the one of the rank before.
        Communication: send and receive, cp, nbytes(block) a rank.
        Source: Liu et al. 2023 (Ring Attention with Blockwise Transformers), section 3.
        """
        incoming = torch.empty_like(block)
        following, before = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        send = dist.P2POp(dist.isend, block, following, self.group, tag)
        works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, before, self.group, tag)])

        def arrived() -> Shaped[Tensor, "..."]:
            for work in works:
                work.wait()
            return incoming

        return arrived

    def on_keys(self, block: Float[Tensor, "2 B K s H"]) -> Arriving:
        """The same for a block of keys and values."""
        self.blocks_sent += 1
        return self.on(block)


class Ring:
    """One attention's way round: which parts of which block meet, and what hides some of their scores.

    Args:
        places: of the tokens in the sequence, by the rank that holds them.
        sees: None where everything earlier is seen.
    """

    def __init__(self, pass_: Pass, places: list[Tensor], sees: Sees | None) -> None:
        self.passing, self._places, self._sees = pass_, places, sees

    def meeting(self, step: int) -> tuple[slice, slice, bool]:
        """Queries and keys that meet in a step, and whether causally: the block then comes from ``step`` ranks before."""
        half = len(self._places[0]) // 2
        source = (self.passing.rank - step) % self.passing.size
        everything, head, tail = slice(None), slice(None, half), slice(half, None)
        if source == self.passing.rank:
            return everything, everything, True
        return (everything, head, False) if source < self.passing.rank else (tail, everything, False)

    def mask(self, step: int, rows: slice, columns: slice, dtype: torch.dtype) -> Mask:
        """What is added to the scores of a step; made anew each time, since it is as large as one head's scores."""
        if self._sees is None:
            return None
        source = (self.passing.rank - step) % self.passing.size
        sees = self._sees(self._places[self.passing.rank][rows], self._places[source][columns]).unsqueeze(1)
        hidden = max(HIDDEN, torch.finfo(dtype).min / 2)
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, hidden)


class _RingAttention(torch.autograd.Function):
    """Causal attention over the whole sequence, for this rank's queries.

    Shapes: q (B, N, S/cp, H), k and v (B, K, S/cp, H) -> (B, N, S/cp, H).
    Placement: Shard(2) over cp, head-tail -> the same.
    Communication: send and receive, cp: forward cp - 1 blocks of keys and values, backward cp - 1 of them and cp of their gradients.
    Source: Liu et al. 2023 (Ring Attention); merging: Milakov and Gimelshein 2018; backward: Dao 2023 (FlashAttention-2), section 3.1.2.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Float[Tensor, "B N s H"], k: Float[Tensor, "B K s H"], v: Float[Tensor, "B K s H"], ring: Ring
    ) -> Float[Tensor, "B N s H"]:
        kernel = kernel_for(q, masked=ring.mask(0, slice(0, 1), slice(0, 1), q.dtype) is not None)
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty(0), torch.empty(0)
        block = torch.stack((k, v))
        for step in range(ring.passing.size):
            incoming = ring.passing.on_keys(block) if step + 1 < ring.passing.size else None
            rows, columns, causal = ring.meeting(step)
            mask = ring.mask(step, rows, columns, q.dtype)
            keys, values = block[..., columns, :]
            part, part_lse = kernel.forward(q[:, :, rows], keys, values, causal, mask)
            if step == 0:
                # Copies, since they will be added to: selective recomputation keeps what the kernel gave.
                out, lse = part.to(wide, copy=True), part_lse.to(wide, copy=True)
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            if incoming is not None:
                block = incoming()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.kernel = ring, kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "B N s H"]) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        block = torch.stack((k, v))
        q_grad, block_grad = torch.zeros_like(q, dtype=wide), torch.zeros_like(block, dtype=wide)
        incoming_grad: Arriving | None = None
        for step in range(ring.passing.size):
            incoming = ring.passing.on_keys(block) if step + 1 < ring.passing.size else None
            rows, columns, causal = ring.meeting(step)
            mask = ring.mask(step, rows, columns, q.dtype)
            keys, values = block[..., columns, :]
            of_rows = (x[:, :, rows] for x in (grad, q, out, lse))
            q_part, *kv_parts = ctx.kernel.backward(*of_rows, keys, values, causal, mask)
            q_grad[:, :, rows] += q_part
            if incoming_grad is not None:
                block_grad = incoming_grad()
            for whole, part in zip(block_grad, kv_parts, strict=True):
                whole[..., columns, :] += part
            if ring.passing.size > 1:
                incoming_grad = ring.passing.on(block_grad, tag=1)
            if incoming is not None:
                block = incoming()
        k_grad, v_grad = (block_grad if incoming_grad is None else incoming_grad()).to(k.dtype)
        return q_grad.to(q.dtype), k_grad, v_grad, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add, in place, what another block's keys give to the same queries."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - total).exp().unsqueeze(-1)).add_((part_lse - total).exp().unsqueeze(-1) * part)
    lse.copy_(total)


def ring_attention(
    q: Float[Tensor, "B s N H"], k: Float[Tensor, "B s K H"], v: Float[Tensor, "B s K H"], ring: Ring
) -> Float[Tensor, "B s N H"]:
    """Causal attention of this rank's queries to the keys of all ranks."""
    return _RingAttention.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ring).transpose(1, 2)
