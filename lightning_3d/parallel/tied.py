"""Parameters that several stages hold under one name are one parameter: tied embeddings across a pipeline.

The copies start equal (they are drawn from the same name) and see the same gradient, so they stay equal bit by bit. For norms,
counts and checkpoints only the copy of the first holder counts.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.mesh import Mesh


def find_tied(names: list[str], mesh: Mesh) -> dict[str, list[int]]:
    """Names that more than one rank of the pipeline holds, with their pp coords in order; the same on all ranks.

    Shapes: none.
    Placement: each rank's own names -> all names on all ranks.
    Communication: all-gather of the names, pp, once at start.
    Source: this project.
    """
    if mesh.dims.pp == 1:
        return {}
    everyone: list[list[str]] = [[] for _ in range(mesh.dims.pp)]
    dist.all_gather_object(everyone, names, group=mesh.pp_group)
    holders: dict[str, list[int]] = {}
    for coord, held in enumerate(everyone):
        for name in held:
            holders.setdefault(name, []).append(coord)
    return {name: coords for name, coords in sorted(holders.items()) if len(coords) > 1}


def exchange_tied(gradients: Mapping[str, Tensor], tied: Mapping[str, list[int]], mesh: Mesh) -> None:
    """Add the gradients of tied copies up, in place; the same sum in the same order on every holder.

    Shapes: any, equal on the holders.
    Placement: each stage's share of the gradient -> the whole gradient on each holder.
    Communication: send and receive between the holders, pp, (holders - 1) x nbytes(gradient) a rank.
    Source: Narayanan et al. 2021 (Megatron-LM), tied embeddings under pipeline parallelism.
    """
    for name, holders in tied.items():
        if mesh.coord.pp not in holders:
            continue
        mine = gradients[name].contiguous()
        copies = {coord: mine if coord == mesh.coord.pp else torch.empty_like(mine) for coord in holders}
        ops = []
        for coord in set(holders) - {mesh.coord.pp}:
            peer = dist.get_global_rank(mesh.pp_group, coord)
            ops += [dist.P2POp(dist.isend, mine, peer, mesh.pp_group), dist.P2POp(dist.irecv, copies[coord], peer, mesh.pp_group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        gradients[name].copy_(torch.stack([copies[coord] for coord in holders]).sum(0))
