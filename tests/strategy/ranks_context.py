"""Attention over cp by each method, next to full attention of the same queries, keys and values."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.model.attention import Documents, sdpa
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.recorder import Recorder

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 24, 8, 4, 6


def position_ids() -> Tensor:
    """One row of documents that cross the borders of every split, and one that is a single document begun before the row."""
    lengths = [1, 4, 9, 2, 7, 1]
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]), torch.arange(5, 5 + LENGTH)])


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)  # q, k, v and the gradient of the output
    return [torch.randn(ROWS, LENGTH, n, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def differences(method: str, documents: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The largest differences of the output and the gradients from full attention; blocks of keys and messages that were sent."""
    q, k, v, grad = inputs(dtype)
    described = Documents(position_ids()) if documents else None
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sdpa(*whole, described)
    out.backward(grad)
    expected = [out.detach(), *(x.grad for x in whole)]

    context = ContextParallel(dist.group.WORLD, method)
    parts = [context.shard(x).clone().requires_grad_() for x in (q, k, v)]
    with Recorder() as forward:
        mine = context.attention(sdpa)(*parts, described)
    blocks = context.passing.blocks_sent
    with Recorder() as backward:
        mine.backward(context.shard(grad))
    sent = [blocks, *(sum(call.op == "send" for call in recorder.calls) for recorder in (forward, backward))]
    seen = [mine.detach(), *(x.grad for x in parts)]
    largest = [float((context.join(x) - full).abs().max()) for x, full in zip(seen, expected, strict=True)]
    return {"largest": largest, "sent": sent, "dtypes": {x.dtype for x in seen}}


def sharded_and_joined() -> tuple[list[int], list[int]]:
    """The places of this rank's tokens, and all joined again."""
    context = ContextParallel(dist.group.WORLD, "ring")
    places = context.places(16)
    assert torch.equal(context.shard(torch.arange(16)[None])[0], places)
    return places.tolist(), context.join(places[None])[0].tolist()
