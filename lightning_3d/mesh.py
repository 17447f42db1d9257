"""Which rank does what: the axes (pp, dp, cp, tp), tp fastest, and the device mesh over them.

A rank's coord follows from its number alone, so every check and every picture works without a process group. tp is the
fastest axis because it talks most: its peers sit next to each other, inside a node.

Different tokens go through the same weights on all ranks of dp x cp, so parameters, gradients and losses see these two as one axis of
"data", on the parameter mesh; only what reads data, or attends to other parts of a sequence, tells them apart. For hybrid sharding
the axis splits into replicate x shard, cp within shard.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.errors import ConfigError

# Lightning's own names where it has them, so that modules written for ModelParallelStrategy run unchanged.
PP, DP, CP, TP = "pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"
REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"


def backend_for(backend: str, device_type: str, *, on_cpu_too: bool) -> str:
    """What sends a process group's tensors: a device's own backend, and gloo for those on the CPU where there are any.

    Groups of a mesh take after that of the world.
    """
    return f"cpu:gloo,{device_type}:{backend}" if on_cpu_too and device_type != "cpu" and ":" not in backend else backend


@dataclass(frozen=True)
class Coord:
    """A rank's place in the mesh."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the axes; ``replicate`` is the part of dp that holds whole copies (hybrid sharding)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    replicate: int = 1

    @classmethod
    def resolve(cls, *, dp: int | Literal["auto"], tp: int, pp: int, world_size: int, cp: int = 1, replicate: int = 1) -> "ParallelDims":
        """Fill in ``dp="auto"`` and check the sizes against the number of processes.

        Raises:
            ConfigError: a size below 1, sizes whose product is not the world size, a ``replicate`` that does not divide dp.
        """
        sizes = {"tp": tp, "pp": pp, "cp": cp, "dp_replicate": replicate} | ({} if dp == "auto" else {"dp": dp})
        for key, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{key}={size!r} must be a whole number of at least 1" + (", or 'auto'" if key == "dp" else ""))
        others = {"tp": tp, "pp": pp} | ({"cp": cp} if cp > 1 else {})
        product, names = prod(others.values()), " x ".join(f"{key}={size}" for key, size in others.items())
        if dp == "auto":
            if world_size % product:
                raise ConfigError(
                    f"{names} = {product} does not divide the {world_size} processes: change devices, {_listed('or', others)}"
                )
            dp = world_size // product
        if dp * product != world_size:
            raise ConfigError(
                f"dp={dp} x {names} = {dp * product}, but there are {world_size} processes (devices x num_nodes): set trainer.devices to "
                f"{dp * product}, or change {_listed('or', ['dp', *others])} (dp: auto takes what is left)"
            )
        if dp % replicate:
            raise ConfigError(f"dp_replicate={replicate} does not divide dp={dp}: choose a divisor of dp")
        return cls(pp=pp, dp=dp, cp=cp, tp=tp, replicate=replicate)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp_cp(self) -> int:
        """Number of ranks that hold the same parameters and see different tokens."""
        return self.dp * self.cp

    def coord(self, rank: int) -> Coord:
        """The place of a rank."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        return Coord(pp=rest // self.dp, dp=rest % self.dp, cp=cp, tp=tp)

    def rank(self, *, pp: int, dp: int, tp: int, cp: int = 0) -> int:
        """The rank at a place."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def describe(self) -> str:
        """The sizes that a reader wants to see."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp} | ({"cp": self.cp} if self.cp > 1 else {})
        return " x ".join(f"{key}={size}" for key, size in sizes.items())


def _listed(word: str, names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}"


@dataclass(frozen=True)
class Mesh:
    """The axes as process groups, for one rank.

    Args:
        device_mesh: all axes (cp where it is larger than 1).
        dp_cp_mesh: dp and cp as one axis, under the name of dp.
        parameter_mesh: the same, or with replicate and shard for it.
    """

    dims: ParallelDims
    coord: Coord
    device_mesh: DeviceMesh
    dp_cp_mesh: DeviceMesh
    parameter_mesh: DeviceMesh

    @classmethod
    def build(cls, dims: ParallelDims, device_type: str) -> "Mesh":
        """Make the process groups; every rank of the world must call this at the same time."""
        dp_cp_mesh = init_device_mesh(device_type, (dims.pp, dims.dp_cp, dims.tp), mesh_dim_names=(PP, DP, TP))
        device_mesh = parameter_mesh = dp_cp_mesh
        if dims.cp > 1:
            device_mesh = init_device_mesh(device_type, (dims.pp, dims.dp, dims.cp, dims.tp), mesh_dim_names=(PP, DP, CP, TP))
        if dims.replicate > 1:
            shape = (dims.pp, dims.replicate, dims.dp_cp // dims.replicate, dims.tp)
            parameter_mesh = init_device_mesh(device_type, shape, mesh_dim_names=(PP, REPLICATE, SHARD, TP))
        return cls(dims, dims.coord(dist.get_rank()), device_mesh, dp_cp_mesh, parameter_mesh)

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the stages of this rank's copy of the model, in order."""
        return self.device_mesh.get_group(PP)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and read other samples."""
        return self.device_mesh.get_group(DP)

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and see other tokens."""
        return self.dp_cp_mesh.get_group(DP)

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and see other parts of the same sequences."""
        return self.device_mesh.get_group(CP)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share each layer of this rank's stages."""
        return self.device_mesh.get_group(TP)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What parameters are sharded over: dp x cp, or replicate x shard."""
        return self.parameter_mesh[(REPLICATE, SHARD)] if self.dims.replicate > 1 else self.parameter_mesh[DP]
