"""This rank's stages: built on the meta device, cut over tp, sharded over dp, then given memory and weights.

No process ever holds the whole model.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import TP, Mesh, ParallelDims
from lightning_3d.parallel.async_tensor import fusing
from lightning_3d.parallel.compiled import Compile, compile_blocks
from lightning_3d.parallel.context import ContextMethod, ContextParallel
from lightning_3d.parallel.data import DataParallel, shard_stage
from lightning_3d.parallel.float8 import Float8, convert_linears
from lightning_3d.parallel.float8_gather import gather_in_float8
from lightning_3d.parallel.plan import Row, apply_plan, full_numel, local_numel
from lightning_3d.parallel.recompute import Recompute, recompute_blocks
from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.parallel.tied import find_tied


def buffers_to(stage: nn.Module, device: torch.device) -> None:
    """Move the buffers, and no parameter; those that modules share stay shared."""
    moved: dict[int, Tensor] = {}
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def global_name(name: str, module: Any) -> str:
    """A parameter's or a layer's name without the stage that holds it: ``layers.17...`` in every layout.

    Only of a ``PipelineMixin``, which keeps them in ``stages``: another module's ``stages.3`` (ConvNeXt has such) is part of the name.
    """
    return _STAGE.sub("", name) if hasattr(module, "build_stage") else name


_STAGE = re.compile(r"^stages\.\d+(\.|$)")


@runtime_checkable
class StageBuilder(Protocol):
    """What building needs of a module."""

    tensor_parallel_plan: Sequence[Row]
    tensor_parallel: TensorParallel | None
    context_parallel: ContextParallel | None

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The module of one stage."""

    def apply_context_parallel(self, stage: nn.Module, context: ContextParallel) -> None:
        """Let the stage's attention reach the other ranks' tokens."""

    def init_stage(self, stage: nn.Module, device: torch.device) -> None:
        """Give the stage memory and its initial weights."""


@dataclass(frozen=True)
class Layout:
    """What decides which parameters, and which parts of them, lie on a rank, and how its stages are built."""

    dims: ParallelDims
    stage_coords: tuple[int, ...] = (0,)  # pp coord of each stage
    data_parallel: DataParallel = "ddp"
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    recompute: Recompute = "none"
    compile: Compile = False
    cp_method: ContextMethod = "ring"
    float8: Float8 | None = None
    cpu_offload: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return len(self.stage_coords)


@dataclass
class Stages:
    """The stages of one rank, by number, and what must be known of their parameters."""

    layout: Layout
    modules: dict[int, nn.Module]
    partial: set[str] = field(default_factory=set)  # names of parameters whose gradients are partial sums over tp
    tied: dict[str, list[int]] = field(default_factory=dict)  # names that several stages hold -> pp coords of the holders
    float8: list[str] = field(default_factory=list)  # names of the linears that compute in it
    float8_gathered: list[str] = field(default_factory=list)  # and of those whose weights FSDP sends in it

    @classmethod
    def build(cls, builder: StageBuilder, mesh: Mesh, device: torch.device, layout: Layout) -> "Stages":
        """Build the stages of this rank; collective.

        Raises:
            ConfigError: two stages of this rank have a parameter of the same name.
        """
        stages = cls(layout, {})
        tp = TensorParallel(mesh.parameter_mesh[TP], sequence_parallel=layout.sequence_parallel) if mesh.dims.tp > 1 else None
        builder.tensor_parallel = tp
        settings = fusing(tp.group) if tp is not None and layout.async_tensor_parallel else {}
        cp = builder.context_parallel = ContextParallel(mesh.cp_group, layout.cp_method) if mesh.dims.cp > 1 else None
        parallelise: Callable[[nn.Module, Any], None] | None = getattr(builder, "parallelize_stage", None)
        for index in (stage for stage, coord in enumerate(layout.stage_coords) if coord == mesh.coord.pp):
            with torch.device("meta"):
                stage = builder.build_stage(index, layout.num_stages)
            stages.check_names(index, stage)
            converted = convert_linears(stage, layout.float8, mesh.dims.tp)
            if parallelise is not None:
                parallelise(stage, mesh.parameter_mesh)
            elif tp is not None:
                stages.partial |= set(apply_plan(stage, builder.tensor_parallel_plan, tp))
            if cp is not None:
                builder.apply_context_parallel(stage, cp)
            recompute_blocks(stage, layout.recompute)
            compile_blocks(stage, layout.compile, **settings)
            shard_stage(stage, mesh, layout.data_parallel, cpu_offload=layout.cpu_offload)
            builder.init_stage(stage, torch.device("cpu") if layout.cpu_offload else device)
            buffers_to(stage, device)  # those FSDP leaves where they are
            stages.float8 += converted
            if layout.float8 is not None and not layout.cpu_offload:  # torch copies offloaded parts before it asks what to send
                stages.float8_gathered += gather_in_float8(stage, converted, layout.float8, mesh)
            stages.modules[index] = stage
        stages.tied = find_tied(list(stages.parameters()), mesh)
        if tied := sorted(stages.tied.keys() | stages.copies().keys()):
            rank_zero_info(f"Tied, since they have one name on several stages of the pipeline: {', '.join(tied)}")
        return stages

    def check_names(self, index: int, stage: nn.Module) -> None:
        """Whether a stage may join those that are there: one name is one parameter, and only the first and the last stage may share some.

        Raises:
            ConfigError: they share others, or blocks.
        """
        again = sorted(self.parameters().keys() & dict(stage.named_parameters()).keys())
        first = dict(self.modules[0].named_parameters()) if 0 in self.modules and index == self.layout.num_stages - 1 else {}
        if any(name not in first or isinstance(getattr(stage, name.split(".")[0]), nn.ModuleList | nn.ModuleDict) for name in again):
            raise ConfigError(
                f"stages {sorted(self.modules)} and {index} lie on one rank and both have {again}: name parameters the same "
                "whatever the number of stages (layers by their number in the model); only the first and the last stage may share some"
            )

    def check_layout(self, layout: Layout) -> None:
        """Whether the stages of an earlier Trainer fit a later one.

        Raises:
            ConfigError: the parameters would lie elsewhere.
        """
        if layout != self.layout:
            raise ConfigError(
                f"the module was built for {self.layout}, and now the strategy is {layout}: make a new module and load a checkpoint into "
                "it, or keep the layout"
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their global names; of those that two of its stages hold, the first."""
        return {name: parameter for stage in reversed(self.modules.values()) for name, parameter in stage.named_parameters()}

    def copies(self) -> dict[str, nn.Parameter]:
        """The second ones: what the last stage shares with the first, where both lie on this rank."""
        first = self.parameters()
        held = (pair for stage in self.modules.values() for pair in stage.named_parameters())
        return {name: parameter for name, parameter in held if first[name] is not parameter}

    def counts(self, mesh: Mesh, device: torch.device) -> tuple[int, int]:
        """Number of parameters of the whole model (tied ones once), and on this rank.

        Shapes: one number a rank.
        Placement: each pipeline rank's count -> the sum on all ranks of the pipeline.
        Communication: all-reduce, pp, 8 bytes.
        Source: this project.
        """
        again = sum(p.numel() for name, p in self.parameters().items() if name in self.tied and self.tied[name][0] != mesh.coord.pp)
        again += sum(p.numel() for p in self.copies().values())
        total = torch.tensor(sum(full_numel(stage) for stage in self.modules.values()) - again, device=device)
        if mesh.dims.pp > 1:
            dist.all_reduce(total, group=mesh.pp_group)
        return int(total), sum(local_numel(stage) for stage in self.modules.values())
