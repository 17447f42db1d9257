"""Ranks of one replica must read the same batch: a loader that draws from a global generator, or a stray sampler, breaks that silently.

A checksum of the batch is compared over the world, for the first batches and then now and then: 8 bytes a rank.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.parallel.microbatch import tensor_leaves
from lightning_3d.placement import SEQUENCE_IDS

FIRST_BATCHES = 3
EVERY_BATCHES = 100


class BatchGuard:
    """Compares batches over the ranks that must hold the same one: same dp coord, and same cp coord where loaders cut sequences."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device, self._seen = mesh, device, 0

    def check(self, batch: Any) -> None:
        """Compare, if it is time to; call it on every rank for every batch.

        Shapes: one number a rank.
        Placement: each rank's checksum -> all checksums on all ranks.
        Communication: all-gather, world, 8 bytes a rank, for the first 3 batches and then every 100th.
        Source: this project.

        Raises:
            ConfigError: on all ranks, naming those that differ.
        """
        due = self._seen < FIRST_BATCHES or self._seen % EVERY_BATCHES == 0
        self._seen += 1
        dims = self._mesh.dims
        parts = dims.cp if isinstance(batch, Mapping) and SEQUENCE_IDS in batch else 1  # of each sequence, one on each rank of cp
        if not due or dims.pp * dims.tp * dims.cp == parts:
            return
        mine = torch.tensor([checksum(batch)], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(dims.world_size)]
        dist.all_gather(everyone, mine)
        sums = [int(value) for value in torch.cat(everyone).tolist()]
        for rank, value in enumerate(sums):
            coord = dims.coord(rank)
            first = dims.rank(pp=0, dp=coord.dp, cp=coord.cp % parts, tp=0)
            if value != sums[first]:
                raise ConfigError(
                    f"ranks {first} and {rank} belong to one model replica but got different batches (batch {self._seen - 1}): make the "
                    "data depend on the dp coord alone (strategy.distributed_sampler_kwargs), not on the rank or a global generator"
                )


def checksum(batch: Any) -> int:
    """A checksum of the bytes of all tensors in a pytree."""
    value = 0
    for tensor in tensor_leaves(batch):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", value)
    return value
