"""What decides the sizes of a run, as a recipe says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.plan import Row
from lightning_3d.parallel.schedules import Engine, stage_coords
from lightning_3d.parallel.stages import Layout

PARAMETER_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


@runtime_checkable
class PlannedModule(Protocol):
    """What planning needs of a module: that of a pipeline whose batches are {"input_ids", "labels"}."""

    tensor_parallel_plan: Sequence[Row]

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The module of one stage."""

    def apply_context_parallel(self, stage: nn.Module, context: ContextParallel) -> None:
        """Let the stage's attention reach the other ranks' tokens."""

    def pipeline_loss(self, output: Any, microbatch: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a microbatch."""

    def stage_kwargs(self, microbatch: Any) -> dict[str, Any]:
        """Keyword inputs of every stage."""


@dataclass(frozen=True)
class Setting:
    """A layout, a batch and a precision.

    Args:
        layout: sizes of the axes, and how parameters are cut.
        engine: schedule of the pipeline.
        microbatches: of a batch of one replica.
        micro_batch_size: sequences of a microbatch.
        sequence_length: tokens of a sequence.
        precision: Lightning's word for it.
        mask_documents: whether batches have positions.
        num_norms: gradient norms that are taken in a step: one for clipping, one for GradNorm.
        num_metrics: numbers that the module reports of each step besides its loss.
        on_cpu: whether the ranks are CPU processes.
        gpus_per_node: ranks of a node.
    """

    layout: Layout
    engine: Engine = "1f1b"
    microbatches: int = 1
    micro_batch_size: int = 1
    sequence_length: int = 2048
    precision: str = "bf16-mixed"
    mask_documents: bool = False
    num_norms: int = 1
    num_metrics: int = 1
    on_cpu: bool = False
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.precision not in PARAMETER_DTYPES:
            raise ConfigError(f"trainer.precision={self.precision!r} cannot be planned: choose from {list(PARAMETER_DTYPES)}")

    @property
    def virtual_stages(self) -> int:
        """Stages on each rank of the pipeline."""
        return self.layout.num_stages // self.layout.dims.pp

    def at(self, dims: ParallelDims, **changes: Any) -> "Setting":
        """The same run on axes of other sizes, and with other changes; a pipeline that goes or comes brings its schedule."""
        engine = self.engine if dims.pp > 1 and self.layout.dims.pp > 1 else "1f1b"
        virtual = self.virtual_stages if engine == self.engine else 1
        layout = replace(self.layout, dims=dims, stage_coords=stage_coords(engine, dims.pp, virtual))
        return replace(self, layout=layout, engine=engine, **changes)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, gradients and optimizer state."""
        return PARAMETER_DTYPES[self.precision]

    @property
    def held_tokens(self) -> int:
        """Tokens of a sequence on a rank: cp splits it."""
        return self.sequence_length // self.layout.dims.cp

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of a step over all replicas."""
        return self.layout.dims.dp * self.microbatches * self.micro_batch_size * self.sequence_length

    @property
    def shards(self) -> int:
        """Ranks that each parameter's first dim is cut over, besides tp."""
        dims = self.layout.dims
        return 1 if self.layout.data_parallel == "ddp" else dims.dp_cp // dims.replicate

    @property
    def scatters_at_once(self) -> bool:
        """Whether FSDP scatters each block's gradients as they come; else they stay whole until the last microbatch."""
        return self.shards > 1 and self.microbatches == 1 and self.layout.dims.pp == 1
