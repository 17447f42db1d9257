"""This rank's stages: built on the meta device, cut over tp, sharded over dp, then given memory and weights.

No process ever holds the whole model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.mesh import TP, Mesh
from lightning_3d.parallel.data import DataParallel, shard_stage
from lightning_3d.parallel.plan import Row, apply_plan, full_numel, local_numel
from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.parallel.tied import find_tied
from lightning_3d.seeding import materialise


@runtime_checkable
class StageBuilder(Protocol):
    """What building needs of a module."""

    init_seed: int
    tensor_parallel_plan: Sequence[Row]

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The module of one stage."""


@dataclass
class Stages:
    """The stages of one rank, by number, and what must be known of their parameters."""

    num_stages: int
    modules: dict[int, nn.Module]
    partial: set[str] = field(default_factory=set)  # names of parameters whose gradients are partial sums over tp
    tied: dict[str, list[int]] = field(default_factory=dict)  # names that several stages hold -> pp coords of the holders

    @classmethod
    def build(
        cls, builder: StageBuilder, mesh: Mesh, device: torch.device, *, virtual: int, mode: DataParallel, tp: TensorParallel | None
    ) -> "Stages":
        """Build stages pp, pp + size, ... of this rank; collective."""
        num_stages = mesh.dims.pp * virtual
        stages = cls(num_stages, {})
        parallelise: Callable[[nn.Module, Any], None] | None = getattr(builder, "parallelize_stage", None)
        for index in range(mesh.coord.pp, num_stages, mesh.dims.pp):
            with torch.device("meta"):
                stage = builder.build_stage(index, num_stages)
            if parallelise is not None:
                parallelise(stage, mesh.parameter_mesh)
            elif tp is not None:
                stages.partial |= set(apply_plan(stage, builder.tensor_parallel_plan, tp))
            shard_stage(stage, mesh, mode)
            materialise(stage, builder.init_seed, device)
            stages.modules[index] = stage
        stages.tied = find_tied(list(stages.parameters()), mesh)
        return stages

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.num_stages - 1 in self.modules

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their global names."""
        return {name: parameter for stage in self.modules.values() for name, parameter in stage.named_parameters()}

    def counts(self, mesh: Mesh, device: torch.device) -> tuple[int, int]:
        """Number of parameters of the whole model (tied ones once), and on this rank.

        Shapes: one number a rank.
        Placement: each pipeline rank's count -> the sum on all ranks of the pipeline.
        Communication: all-reduce, pp, 8 bytes.
        Source: this project.
        """
        again = sum(p.numel() for name, p in self.parameters().items() if name in self.tied and self.tied[name][0] != mesh.coord.pp)
        total = torch.tensor(sum(full_numel(stage) for stage in self.modules.values()) - again, device=device)
        if mesh.dims.pp > 1:
            dist.all_reduce(total, group=mesh.pp_group)
        return int(total), sum(local_numel(stage) for stage in self.modules.values())


def tensor_parallel(mesh: Mesh, *, sequence_parallel: bool) -> TensorParallel | None:
    """This rank's part in tensor parallelism, or None for tp=1."""
    return TensorParallel(mesh.parameter_mesh[TP], sequence_parallel=sequence_parallel) if mesh.dims.tp > 1 else None
