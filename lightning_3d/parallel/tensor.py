"""Tensor parallelism: a layer's matrices are cut over tp, and the cuts are joined by two collectives.

Parameters are DTensors, for initialisation, sharded state and checkpoints; the forward and backward compute on local tensors
and call explicit collectives, so that each byte sent is visible here. DTensor's dispatch costs 25 to 35 ms a layer on a CPU.

A layer computes between two places: *enter* (behind the norm: from here each rank works on its own heads or ffn columns) and
*leave* (behind the row-cut matrix, where the partial sums are added up):

    hidden --norm--> enter --q,k,v--> attention --o--> leave --> + hidden

What communicates at neither of them is *inside* (between the two) or *outside*.
Without sequence parallelism the hidden state is whole on every rank: enter copies (its backward adds up gradients), leave adds up.
With it each rank holds S/tp of the sequence outside: enter gathers, leave adds up and scatters; the same bytes, 1/tp of the memory.

A module becomes parallel as under FSDP2, by a subclass of its own class: what it is and how it draws its weights stay its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.collectives import all_gather_single, reduce_scatter_single
from lightning_3d.placement import local_range

Region = Literal["outside", "enter", "inside", "leave"]


# ---- collectives ---------------------------------------------------------------------------------------------------------


def all_reduce_sum(x: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "..."]:
    """Add up over the group.

    Shapes: any, unchanged.
    Placement: partial sums -> replicated over tp.
    Communication: all-reduce, tp, 2 (tp - 1) / tp x nbytes(x) sent a rank.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """
    if group.size() == 2 and x.device.type == "cpu":  # the same bytes in one exchange instead of two: 2/3 of gloo's CPU time
        return torch.add(*gather(x, group))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gather(x: Float[Tensor, "..."], group: dist.ProcessGroup) -> Float[Tensor, "tp ..."]:
    """The ranks' tensors, stacked.

    Shapes: any, equal on the ranks -> one dim more, tp, in front.
    Placement: each rank's own -> replicated over tp.
    Communication: all-gather, tp, (tp - 1) x nbytes(x) received a rank.
    Source: this project.
    """
    parts = x.new_empty((group.size(), *x.shape))
    all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts


def gather_sequence(x: Float[Tensor, "B S/tp D"], group: dist.ProcessGroup) -> Float[Tensor, "B S D"]:
    """Join the ranks' parts of the sequence.

    Shapes: (B, S/tp, D) -> (B, S, D).
    Placement: Shard(1) -> replicated over tp.
    Communication: all-gather, tp, (tp - 1) x nbytes(x) received a rank.
    Source: Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.2.2.
    """
    rows = x.flatten(0, 1) if len(x) == 1 else x  # one sequence needs no copy to come in order
    parts = x.new_empty((group.size() * len(rows), *rows.shape[1:]))
    all_gather_single(parts, rows.contiguous(), group=group)
    return parts.view(1, *parts.shape) if len(x) == 1 else torch.cat(parts.chunk(group.size()), 1)


def scatter_sequence(x: Float[Tensor, "B S D"], group: dist.ProcessGroup) -> Float[Tensor, "B S/tp D"]:
    """Add up over the group and keep this rank's part of the sequence.

    Shapes: (B, S, D) -> (B, S/tp, D); S must be divisible by tp.
    Placement: partial sums -> Shard(1) over tp.
    Communication: reduce-scatter, tp, (tp - 1) / tp x nbytes(x) sent a rank.
    Source: Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.2.2.
    """
    parts = x.flatten(0, 1).contiguous() if len(x) == 1 else torch.cat(x.chunk(group.size(), 1))
    part = x.new_empty((len(parts) // group.size(), *parts.shape[1:]))
    reduce_scatter_single(part, parts, group=group)
    return part.view(1, *part.shape) if len(x) == 1 else part


class _Communicate(torch.autograd.Function):
    """A collective whose backward is another one."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "..."], forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "..."]:
        ctx.backward_of = backward
        y = forward(x)
        return y.view_as(y)  # compiled by torch 2.11, one that was written in place and is returned itself gets no gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grads[0]), None, None


class TensorParallel:
    """How one rank takes part in a group: its collectives at *enter* and *leave*, with or without sequence parallelism."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.index = mesh.get_local_rank()
        self.sequence_parallel = sequence_parallel
        self.classes: dict[
            Any, type[nn.Module]
        ] = {}  # one for all modules of a kind: torch.compile takes a class of its own for other code

    def _sum(self, x: Tensor) -> Tensor:
        return all_reduce_sum(x, self.group)

    def _gather(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.group)

    def _scatter(self, x: Tensor) -> Tensor:
        if x.shape[1] % self.size:
            raise ConfigError(
                f"sequence_length={x.shape[1]} is not divisible by tp={self.size}, as sequence_parallel: true needs: change one"
            )
        return scatter_sequence(x, self.group)

    @staticmethod
    def _same(x: Tensor) -> Tensor:
        return x

    def distribute(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """This rank's part of a parameter on the meta device, cut on ``dim`` (None: whole), as a DTensor."""
        assert parameter.is_meta
        shape = list(parameter.shape)
        if dim is not None:
            start, end = local_range(shape[dim], self.size, self.index)
            shape[dim] = end - start
        placement = Replicate() if dim is None else Shard(dim)
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        whole = DTensor.from_local(local, self.mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride())
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def enter(self, x: Float[Tensor, "B s D"]) -> Float[Tensor, "B S D"]:
        """(B, S, D) or (B, S/tp, D) -> (B, S, D), for every rank to work on its own columns.

        Under autocast the sequence is gathered in its dtype, which the products that follow take anyway: half the bytes.
        """
        if self.sequence_parallel and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        pair = (self._gather, self._scatter) if self.sequence_parallel else (self._same, self._sum)
        return _Communicate.apply(x, *pair)

    def leave(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B s D"]:
        """Partial sums (B, S, D) -> (B, S, D) or (B, S/tp, D)."""
        pair = (self._scatter, self._gather) if self.sequence_parallel else (self._sum, self._same)
        return _Communicate.apply(x, *pair)


# ---- modules -------------------------------------------------------------------------------------------------------------


def parallelise_module(module: nn.Module, tp: TensorParallel, region: Region, shard_dim: int | None) -> list[str]:
    """Cut the module's parameters on ``shard_dim`` (None: keep them whole) and let it communicate as its region needs.

    A bias is cut with the rows of its matrix (``shard_dim=0``) and whole otherwise. Parameters must be on the meta device.

    Returns:
        The names of the parameters whose gradients are partial sums over tp: whole parameters which each rank uses for a
        part of the sequence or of the heads, and biases that each rank adds 1/tp of.

    Raises:
        ConfigError: a cut that the region has no sense for, an embedding whose settings a cut one cannot have.
    """
    _check_cut(module, region, shard_dim)
    partial = []
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        dim = shard_dim if parameter.dim() > 1 or shard_dim == 0 else None
        module._parameters[name] = tp.distribute(parameter, dim)
        if dim is None and (region in ("inside", "leave") or tp.sequence_parallel):
            partial.append(name)
    embeds = isinstance(module, nn.Embedding) and shard_dim == 0
    module.__class__ = _subclass(type(module), tp, region, list(module._parameters), embeds=embeds)
    return partial


def _check_cut(module: nn.Module, region: Region, shard_dim: int | None) -> None:
    name = type(module).__name__
    summed = 0 if isinstance(module, nn.Embedding) else 1  # the dim whose cut makes outputs partial sums
    if (region == "leave") != (shard_dim == summed) or (region in ("outside", "enter") and shard_dim is not None):
        raise ConfigError(
            f"tensor-parallel plan: {name} in region {region!r} with shard_dim={shard_dim}: 'leave' goes with shard_dim={summed} and "
            "only with it, 'enter' and 'outside' with none"
        )
    if isinstance(module, nn.Embedding) and shard_dim == 0:
        for key in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(module, key)
            if value is not None and value is not False:  # padding_idx may be 0
                raise ConfigError(f"{key}={value} of an embedding that is cut over tp is not supported: leave it out")


def _subclass(cls: type[nn.Module], tp: TensorParallel, region: Region, names: list[str], *, embeds: bool) -> type[nn.Module]:
    key = (cls, region, embeds, *names)
    if key in tp.classes:
        return tp.classes[key]
    joins: dict[str, Callable[[Tensor], Tensor]] = {"enter": tp.enter, "leave": tp.leave}
    join = joins.get(region, lambda y: y)

    def forward(self: nn.Module, x: Shaped[Tensor, "B s *E"]) -> Float[Tensor, "B t O"]:
        return join(_embed(self, x, tp) if embeds else cls.forward(self, x))

    scales = {name: 1 / tp.size if name == "bias" and region == "leave" else 1.0 for name in names}
    members: dict[str, Any] = {name: _local_property(name, scale) for name, scale in scales.items()}
    tp.classes[key] = type(f"{region.capitalize()}{cls.__name__}", (cls,), members | {"forward": forward})
    return tp.classes[key]


def _local_property(name: str, scale: float) -> property:
    """The module's own code sees the local tensor, everything that walks over its parameters the DTensor.

    FSDP reads parameters as attributes too, but only while they are sharded over dp besides: those it gets as they are.
    """

    def local(self: nn.Module) -> Tensor | None:
        parameter: Tensor | None = self._parameters[name]
        tensor: Tensor | None = getattr(parameter, "local_leaf", None)
        if tensor is None:
            if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
                return parameter
            tensor = parameter.to_local()
        return tensor if scale == 1.0 else tensor * scale

    return property(local)


@contextmanager
def local_leaves(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Within, modules compute with plain leaves that share the parameters' memory; gives the leaves, by name.

    ``to_local()`` costs a DTensor, made in Python, in the backward of each use, and DTensors add up through dispatch: half of a step's
    time for a small model on a CPU. Leaves add up in C++.
    """
    lent = {name: p for name, p in parameters.items() if isinstance(p, DTensor) and p.device_mesh.ndim == 1 and p.requires_grad}
    leaves = {name: p.to_local().detach().requires_grad_() for name, p in lent.items()}
    for name, leaf in leaves.items():
        lent[name].local_leaf = leaf  # type: ignore[attr-defined]
    try:
        yield leaves
    finally:
        for parameter in lent.values():
            del parameter.local_leaf  # type: ignore[attr-defined]


def _embed(module: nn.Module, ids: Int[Tensor, "B S"], tp: TensorParallel) -> Float[Tensor, "B S D"]:
    """This rank's part of the vocabulary looks up its own ids and gives zeros for the others."""
    assert isinstance(module, nn.Embedding)
    start, end = local_range(module.num_embeddings, tp.size, tp.index)
    mine = (ids >= start) & (ids < end)
    if start == end:  # more ranks than parts of the vocabulary
        return module.weight.new_zeros((*ids.shape, module.embedding_dim)) + module.weight.sum()
    return nn.functional.embedding((ids - start).where(mine, 0), module.weight) * mine.unsqueeze(-1)
