"""Which rank does what: the axes (pp, dp, tp), tp fastest, and the device mesh over them.

A rank's coord follows from its number alone, so every check and every picture works without a process group. tp is the
fastest axis because it talks most: its peers sit next to each other, inside a node. For hybrid sharding dp splits into
replicate x shard; parameters then live on a second mesh that has both axes, while everything else still sees one dp.
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.errors import ConfigError

# Lightning's own names where it has them, so that modules written for ModelParallelStrategy run unchanged.
PP, DP, TP = "pipeline_parallel", "data_parallel", "tensor_parallel"
REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"


@dataclass(frozen=True)
class Coord:
    """A rank's place in the mesh."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the axes; ``replicate`` is the part of dp that holds whole copies (hybrid sharding)."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    replicate: int = 1

    @classmethod
    def resolve(cls, *, dp: int | Literal["auto"], tp: int, pp: int, world_size: int, replicate: int = 1) -> "ParallelDims":
        """Fill in ``dp="auto"`` and check the sizes against the number of processes.

        Raises:
            ConfigError: a size below 1, sizes whose product is not the world size, a ``replicate`` that does not divide dp.
        """
        sizes = {"tp": tp, "pp": pp, "dp_replicate": replicate} | ({} if dp == "auto" else {"dp": dp})
        for key, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{key}={size!r} must be a whole number of at least 1" + (", or 'auto'" if key == "dp" else ""))
        if dp == "auto":
            if world_size % (tp * pp):
                raise ConfigError(f"tp={tp} x pp={pp} = {tp * pp} does not divide the {world_size} processes: change devices, tp or pp")
            dp = world_size // (tp * pp)
        if dp * tp * pp != world_size:
            raise ConfigError(
                f"dp={dp} x tp={tp} x pp={pp} = {dp * tp * pp}, but there are {world_size} processes (devices x num_nodes): "
                f"set trainer.devices to {dp * tp * pp}, or change dp, tp or pp (dp: auto takes what is left)"
            )
        if dp % replicate:
            raise ConfigError(f"dp_replicate={replicate} does not divide dp={dp}: choose a divisor of dp")
        return cls(pp=pp, dp=dp, tp=tp, replicate=replicate)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.tp

    def coord(self, rank: int) -> Coord:
        """The place of a rank."""
        return Coord(pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp, tp=rank % self.tp)

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """The rank at a place."""
        return (pp * self.dp + dp) * self.tp + tp


@dataclass(frozen=True)
class Mesh:
    """The axes as process groups, for one rank."""

    dims: ParallelDims
    coord: Coord
    device_mesh: DeviceMesh
    parameter_mesh: DeviceMesh

    @classmethod
    def build(cls, dims: ParallelDims, device_type: str) -> "Mesh":
        """Make the process groups; every rank of the world must call this at the same time."""
        device_mesh = init_device_mesh(device_type, (dims.pp, dims.dp, dims.tp), mesh_dim_names=(PP, DP, TP))
        parameter_mesh = device_mesh
        if dims.replicate > 1:
            shape = (dims.pp, dims.replicate, dims.dp // dims.replicate, dims.tp)
            parameter_mesh = init_device_mesh(device_type, shape, mesh_dim_names=(PP, REPLICATE, SHARD, TP))
        return cls(dims, dims.coord(dist.get_rank()), device_mesh, parameter_mesh)

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the stages of this rank's copy of the model, in order."""
        return self.device_mesh.get_group(PP)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and read other data."""
        return self.device_mesh.get_group(DP)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share each layer of this rank's stages."""
        return self.device_mesh.get_group(TP)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What parameters are sharded over: dp, or replicate x shard."""
        return self.parameter_mesh[(REPLICATE, SHARD)] if self.dims.replicate > 1 else self.parameter_mesh[DP]
