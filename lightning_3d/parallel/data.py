"""Data parallelism: who holds a copy of each parameter, and how the gradients of the copies become one.

    ddp     every rank of dp holds all of its stage's parameters; one bucketed all-reduce a step
    zero2   gradients and optimizer state are sharded; parameters are whole from the first forward to the last backward of a step
    fsdp    parameters too: gathered block by block, freed after use
    hsdp    fsdp within groups of dp / dp_replicate ranks, copies between the groups

The loss is a sum over the global batch divided by its number of tokens, so gradients are *added* over dp, never averaged.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.mesh import DP, SHARD, Mesh
from lightning_3d.parallel.blocks import blocks_of

DataParallel = Literal["ddp", "zero2", "fsdp", "hsdp"]
DATA_PARALLEL_MODES: tuple[str, ...] = get_args(DataParallel)

BUCKET_NBYTES = 64 * 2**20


def shard_stage(stage: nn.Module, mesh: Mesh, mode: DataParallel, *, cpu_offload: bool = False) -> None:
    """Shard the stage's parameters over dp (none for ``ddp``); they must be on the meta device.

    The members of the stage's module lists and dicts (its blocks) are one unit each, the rest is one more. The stage itself is
    the root unit: torch's pipelining defers the reduction to the end of the step only then. Under pp parameters stay whole
    between microbatches, else every microbatch would pay a gather.

    Under ``cpu_offload`` the shards, their gradients and optimizer state lie on the CPU; parameters are copied to the device as they are
    gathered, gradients back as they are scattered. What is added up of them later, over tp and between tied stages, goes over gloo.
    """
    place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    if mode != "ddp" and mesh.dims.dp_cp > 1:
        reshard = mode != "zero2" and mesh.dims.pp == 1
        for block in blocks_of(stage):
            fully_shard(block, mesh=mesh.fsdp_mesh, reshard_after_forward=reshard, offload_policy=place)
        fully_shard(stage, mesh=mesh.fsdp_mesh, reshard_after_forward=False, offload_policy=place)
        if reshard:
            gather_ahead(stage)
    for module in stage.modules():  # also where parallelize_stage() sharded under "ddp"
        if isinstance(module, FSDPModule):  # the second call alone fails on gloo, and neither recurses
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def gather_ahead(stage: nn.Module) -> None:
    """In the forward, let FSDP gather each block before the one before it computes, the first one before what comes before the blocks.

    By itself FSDP asks for a block's parameters when its turn comes, which is early enough only while the CPU is ahead of the GPU. In the
    backward it asks one block ahead anyway.
    """
    for unit, block in pairwise([stage, *blocks_of(stage)]):
        assert isinstance(unit, FSDPModule)
        assert isinstance(block, FSDPModule)
        unit.set_modules_to_forward_prefetch([block])


def set_last_microbatch(stage: nn.Module, last: bool) -> None:
    """Let FSDP accumulate without communication until the last microbatch."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_reshard_after_backward(last)
        stage.set_requires_gradient_sync(last)


def is_reduced_by_fsdp(parameter: Shaped[Tensor, "..."]) -> bool:
    """Whether FSDP adds this parameter's gradient up over dp itself."""
    return isinstance(parameter, DTensor) and bool({DP, SHARD} & set(parameter.device_mesh.mesh_dim_names or ()))


@torch.no_grad()
def local(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def start_equal(module: nn.Module, mesh: Mesh) -> None:
    """Replicas take the first one's weights, as under DDP: for modules whose weights were not drawn by name.

    Shapes: any.
    Placement: each replica's own -> replicated over dp.
    Communication: broadcast, dp, nbytes(parameters and buffers), once at start.
    Source: Li et al. 2020 (PyTorch Distributed), section 3.1.
    """
    source = dist.get_global_rank(mesh.dp_group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_reduced_by_fsdp(tensor) and mesh.dims.dp > 1:
            dist.broadcast(local(tensor), source, group=mesh.dp_group)


def local_as(tensor: Shaped[Tensor, "..."], like: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The inverse: a DTensor of this part, placed as another one is."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor(tensor, like._spec, requires_grad=False)  # from_local() would take offloaded ones to the GPU


def add_up(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The sums of tensors over a group, in buckets; they are views of the buckets, so that nothing is copied back.

    Shapes: any.
    Placement: partial sums -> replicated over the group.
    Communication: all-reduce, dp (gradients of copies) or tp (gradients that each rank computed from part of the sequence),
        2 (n - 1) / n x nbytes sent a rank.
    Source: Li et al. 2020 (PyTorch Distributed), section 3.2.3.
    """
    sums: dict[str, Tensor] = {}
    for bucket in buckets(tensors):
        flat = torch.cat([tensors[name].reshape(-1) for name in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[name].numel() for name in bucket])
        sums |= {name: part.view_as(tensors[name]) for name, part in zip(bucket, parts, strict=True)}
    return sums


def buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names in groups of one dtype, which hold 64 MiB or just above, the last ones less."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        bucket = by_dtype.setdefault(tensor.dtype, [])
        bucket.append(name)
        if sum(tensors[other].nbytes for other in bucket) >= BUCKET_NBYTES:
            yield by_dtype.pop(tensor.dtype)
    yield from by_dtype.values()
