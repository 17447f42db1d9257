"""One gradient norm for the whole model, in every layout.

Every element of every gradient is counted by exactly one rank: where an axis holds copies, the rank with coord 0 on it counts, and of
tied copies on several stages the first. So one all-reduce of one number over the world gives the norm, whatever meshes the parameters
live on, and all ranks scale by the same factor. Clipping each stage by its own norm is a classic silent fault.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.mesh import DP, REPLICATE, SHARD, TP, Mesh
from lightning_3d.parallel.data import local


def is_counted(tensor: Shaped[Tensor, "..."], mesh: Mesh) -> bool:
    """Whether this rank is the one that counts the elements of ``tensor`` that it holds."""
    data, shards = mesh.coord.dp * mesh.dims.cp + mesh.coord.cp, mesh.dims.dp_cp // mesh.dims.replicate
    index = {DP: data, REPLICATE: data // shards, SHARD: data % shards, TP: mesh.coord.tp}
    placed = {}
    if isinstance(tensor, DTensor):
        placed = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    dp_axes = {REPLICATE, SHARD} if SHARD in placed else {DP}
    # Not is_shard(): what FSDP makes of a dim that tp has cut already (_StridedShard) does not call itself a shard.
    return all(index[axis] == 0 or (axis in placed and not placed[axis].is_replicate()) for axis in {TP} | dp_axes)


@torch.no_grad()
def gradient_norm(gradients: Iterable[Tensor], mesh: Mesh, norm_type: float = 2.0) -> Float[Tensor, ""]:
    """The norm of all gradients of the model; ``gradients`` are this rank's (tied copies left out but on their first holder).

    Shapes: any -> ().
    Placement: each rank's elements -> replicated over the world.
    Communication: all-reduce, world, 8 bytes a rank.
    Source: Pascanu et al. 2013, section 3.2; counted once as in Megatron-LM issue 7227.
    """
    counted = [local(gradient) for gradient in gradients if is_counted(gradient, mesh)]
    device = mesh.device_mesh.device_type
    norms = torch.stack(torch._foreach_norm(counted, norm_type)).double() if counted else torch.zeros(1, dtype=torch.float64)
    norms = norms.to(device)  # those of offloaded gradients are on the CPU
    total = norms.max() if norm_type == math.inf else norms.pow(norm_type).sum()
    if mesh.dims.world_size > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM)
    return total if norm_type == math.inf else total.pow(1 / norm_type)


def scale_to_norm(gradients: Iterable[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Scale the gradients down, in place, so that their norm is at most ``max_norm`` (torch's formula, with its 1e-6)."""
    locals_ = [local(gradient) for gradient in gradients]
    if locals_:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(locals_, factor.to(locals_[0]))  # its dtype and device


def clip_values(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit], in place."""
    for gradient in gradients:
        local(gradient).clamp_(-limit, limit)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer is about to use."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
