"""Context parallelism: the ranks of cp hold parts of the same sequences, and attention reaches across.

Everything else in a model looks at one token at a time, so only three things know of cp: which tokens a rank holds (`shard`, the one
function for inputs, labels and positions), which positions they have (`rotary`), and attention (`attention`), by one of three methods:

    ring        keys and values go round in cp - 1 steps; memory of S/cp (parallel/ring.py)
    allgather   keys and values of the whole sequence are gathered; one collective, memory of S for them alone
    ulysses     two all-to-alls: between them a rank has the whole sequence for 1/cp of its heads, and any attention will do

A rank holds two chunks, one counted from the front and one from the back (placement.head_tail): under a causal mask all have equal work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ConfigError
from lightning_3d.model.attention import Documents, masked_sdpa
from lightning_3d.model.rope import RotaryTables
from lightning_3d.parallel.collectives import all_gather_single, reduce_scatter_single
from lightning_3d.parallel.ring import Pass, Ring, Sees, ring_attention
from lightning_3d.placement import head_tail

ContextMethod = Literal["ring", "allgather", "ulysses"]
CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)

Attend = Callable[..., Tensor]


def check_method(method: str | None, cp: int) -> None:
    """Refuse what is no method.

    Raises:
        ConfigError: an unknown method, or one without cp.
    """
    if method is not None and method not in CONTEXT_METHODS:
        raise ConfigError(f"cp_method={method!r} is unknown: choose from {list(CONTEXT_METHODS)}")
    if method is not None and cp == 1:
        raise ConfigError(f"cp_method={method} has no effect with cp=1: set cp to 2 or more, or leave cp_method out")


class ContextParallel:
    """What a rank of cp knows and does; given to modules that support it.

    Args:
        group: the ranks of cp.
        method: how attention reaches the other ranks' tokens.
    """

    def __init__(self, group: dist.ProcessGroup, method: ContextMethod) -> None:
        self.group, self.method = group, method
        self.size, self.index = group.size(), group.rank()
        self.passing = Pass(group)
        self._places: dict[tuple[torch.device, int], list[Tensor]] = {}  # of each rank's tokens, by the number of tokens held

    # ---- which tokens ----------------------------------------------------------------------------------------------------

    def places(self, length: int, index: int | None = None) -> Int[Tensor, "s"]:
        """Places in a sequence of ``length`` tokens of those that a rank holds, this one unless another is named."""
        chunks = head_tail(length, self.size, self.index if index is None else index)
        return torch.cat([torch.arange(*chunk) for chunk in chunks])

    def shard(self, tensor: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """This rank's part of a tensor that has the sequence on ``dim``.

        Raises:
            ConfigError: the sequence does not divide.
        """
        chunks = head_tail(tensor.shape[dim], self.size, self.index)
        return torch.cat([tensor.narrow(dim, start, end - start) for start, end in chunks], dim)

    def shard_tree(self, tree: Any) -> Any:
        """This rank's part of every tensor of a pytree that has a dim 1."""
        return pytree.tree_map_only(Tensor, lambda t: self.shard(t) if t.dim() > 1 else t, tree)

    def join(self, part: Shaped[Tensor, "B s ..."]) -> Shaped[Tensor, "B S ..."]:
        """The whole sequence, of all ranks' parts; without gradients.

        Shapes: (B, S/cp, ...) -> (B, S, ...).
        Placement: Shard(1) over cp, head-tail -> replicated over cp.
        Communication: all-gather, cp, (cp - 1) x nbytes(part) received a rank.
        Source: this project.
        """
        return _in_order(_all_gather(part, self.group))

    def join_tree(self, tree: Any) -> Any:
        """Every tensor of a pytree that has a dim 1, whole."""
        return pytree.tree_map_only(Tensor, lambda t: self.join(t) if t.dim() > 1 else t, tree)

    # ---- what a stage needs ----------------------------------------------------------------------------------------------

    def rotary(self, rope: RotaryTables) -> "HeldRotary":
        """The same tables, for the tokens held."""
        return HeldRotary(rope, self)

    def attention(self, attend: Attend) -> Attend:
        """Attention of the tokens held to all of the sequence; ``attend`` is the model's own, which ulysses uses."""
        methods = {"ring": self._ring, "allgather": self._allgather, "ulysses": partial(_ulysses, attend, self.group)}
        return torch.compiler.disable(methods[self.method])  # graphs end here: sends and receives are in none

    def _ring(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        key = (q.device, q.shape[1])
        if key not in self._places:
            length = q.shape[1] * self.size
            self._places[key] = [self.places(length, index).to(q.device) for index in range(self.size)]
        return ring_attention(q, k, v, Ring(self.passing, self._places[key], None if documents is None else _sees(documents)))

    def _allgather(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        keys, values = _GatherSequence.apply(torch.cat((k, v), -1), self.group).chunk(2, -1)
        outs = []
        for part, (start, end) in zip(q.chunk(2, 1), head_tail(keys.shape[1], self.size, self.index), strict=True):
            places = torch.arange(end, device=q.device)
            sees = _sees(documents)(places[start:], places)
            mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees, -torch.inf).unsqueeze(1)
            outs.append(masked_sdpa(part, keys[:, :end], values[:, :end], mask))
        return torch.cat(outs, 1)


class HeldRotary:
    """Cosines and sines of the tokens that a rank holds, in place of a stage's ``RotaryTables``."""

    def __init__(self, rope: RotaryTables, context: ContextParallel) -> None:
        self._rope, self._context = rope, context
        self._cache: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, sequence_length: int, device: torch.device, position_ids: Int[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "*batch s 1 H"], Float[Tensor, "*batch s 1 H"]]:
        """For so many tokens held; or by the positions of *all* of the sequence's tokens."""
        if position_ids is not None:
            held = self._context.shard(position_ids)
            return self._rope(held.shape[1], device, held)
        key = (device, sequence_length)
        if key not in self._cache:
            with torch.inference_mode(False):  # a validation pass may come first
                tables = self._rope(sequence_length * self._context.size, device)
                cos, sin = (self._context.shard(table, 0) for table in tables)
                self._cache[key] = cos, sin
        return self._cache[key]


def _sees(documents: Documents | None) -> Sees:
    """Whether tokens at these places see keys at those: earlier ones, from the beginning of their own document on."""

    def sees(queries: Int[Tensor, "s"], keys: Int[Tensor, "t"]) -> Bool[Tensor, "b s t"]:
        earlier = keys <= queries[:, None]
        return earlier[None] if documents is None else earlier & (keys >= documents.starts[:, queries, None])

    return sees


# ---- collectives ---------------------------------------------------------------------------------------------------------


def _in_order(parts: Shaped[Tensor, "cp B s ..."]) -> Shaped[Tensor, "B S ..."]:
    """Ranks' parts as one sequence: the heads from the first rank to the last, then the tails back."""
    heads, tails = parts.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((heads, tails.flip(0))).movedim(0, 1).flatten(1, 2)


def _by_rank(whole: Shaped[Tensor, "B S ..."], size: int) -> Shaped[Tensor, "cp B s ..."]:
    """The inverse."""
    heads, tails = whole.unflatten(1, (2, size, -1)).unbind(1)
    return torch.stack((heads, tails.flip(1)), 2).flatten(2, 3).movedim(1, 0)


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Shaped[Tensor, "cp ..."]:
    parts = part.new_empty((group.size(), *part.shape))
    all_gather_single(parts.flatten(0, 1), part.contiguous(), group=group)
    return parts


class _GatherSequence(torch.autograd.Function):
    """The whole sequence on every rank.

    Shapes: (B, S/cp, ...) -> (B, S, ...).
    Placement: Shard(1) over cp, head-tail -> replicated over cp (each rank uses it for its own queries).
    Communication: all-gather, cp, (cp - 1) x nbytes received a rank; backward: reduce-scatter, the same.
    Source: Llama Team 2024 (The Llama 3 Herd of Models), section 3.3.2.
    """

    @staticmethod
    def forward(ctx: Any, part: Float[Tensor, "B s ..."], group: dist.ProcessGroup) -> Float[Tensor, "B S ..."]:
        ctx.group = group
        return _in_order(_all_gather(part, group))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "B S ..."]) -> tuple[Tensor, None]:
        parts = _by_rank(grad, ctx.group.size()).contiguous()
        part = torch.empty_like(parts[0])
        reduce_scatter_single(part, parts.flatten(0, 1), group=ctx.group)
        return part, None


class _Exchange(torch.autograd.Function):
    """Slice i goes to rank i; what comes from rank i is slice i. Its own inverse, and its own backward.

    Shapes: (cp, ...), unchanged.
    Placement: dim 0 by receiver -> dim 0 by sender.
    Communication: all-to-all, cp, (cp - 1) / cp x nbytes sent a rank.
    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.
    """

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "cp ..."], group: dist.ProcessGroup) -> Float[Tensor, "cp ..."]:
        ctx.group = group
        x = x.contiguous()
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "cp ..."]) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


def _ulysses(attend: Attend, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
    """Queries, keys and values cross in one all-to-all, outputs in another."""
    by_heads = [x.unflatten(2, (group.size(), -1)) for x in (q, k, v)]  # (B, s, cp, heads/cp, H)
    counts = [x.shape[3] for x in by_heads]
    mine = _in_order(_Exchange.apply(torch.cat(by_heads, 3).movedim(2, 0), group))
    given = () if documents is None else (documents,)
    out = _by_rank(attend(*mine.split(counts, 2), *given), group.size())
    return _Exchange.apply(out, group).movedim(0, 2).flatten(2, 3)
