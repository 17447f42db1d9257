"""What a LightningModule does to be split into pipeline stages.

The same module runs under a plain ``Trainer`` (one stage, one microbatch: the reference of the parity tests) and under
``ThreeDStrategy``. It says what its stages are and what its loss is; who runs which stage when is the strategy's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.microbatch import split_batch, tensor_leaves
from lightning_3d.parallel.plan import Row
from lightning_3d.parallel.stages import Stages
from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.seeding import materialise


class PipelineMixin:
    """Put before LightningModule: ``class MyLM(PipelineMixin, LightningModule)``.

    Define ``build_stage(index, num_stages) -> nn.Module`` (built on the meta device; the keys of its state_dict are global names, the same
    whatever the number of stages) and ``pipeline_loss(output, microbatch)`` (on the last stage: the mean loss over the microbatch, or
    (loss, {"metric": value})). Then call ``pipeline_step(batch)`` in training_step and validation_step.
    """

    init_seed: int = 42
    tensor_parallel_plan: tuple[Row, ...] = ()
    tensor_parallel: TensorParallel | None = None  # set by the strategy where tp > 1
    context_parallel: ContextParallel | None = None  # set by the strategy where cp > 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stages = nn.ModuleDict()  # this rank's, by number
        self.built: Stages | None = None  # what the strategy must know of them

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The module of one stage; override."""
        raise TypeError(f"{type(self).__name__} must define build_stage(index, num_stages)")

    def init_stage(self, stage: nn.Module, device: torch.device) -> None:
        """Give a stage, or this rank's parts of it, memory and initial weights: drawn by ``init_seed``; a checkpoint is loaded later."""
        materialise(stage, self.init_seed, device)

    def pipeline_loss(self, output: Any, microbatch: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss of a microbatch, from the last stage's output; override."""
        raise TypeError(f"{type(self).__name__} must define pipeline_loss(output, microbatch)")

    def apply_context_parallel(self, stage: nn.Module, context: ContextParallel) -> None:
        """Override to support cp: give the stage's attention what ``context`` makes of it, and positions of the tokens held."""
        raise TypeError(f"{type(self).__name__} must define apply_context_parallel(stage, context)")

    def shard_sequence(self, batch: Any) -> Any:
        """With cp, this rank's part of a batch: the tokens at ``context_parallel.places``, of every tensor that has a dim 1."""
        assert self.context_parallel is not None
        return self.context_parallel.shard_tree(batch)

    def join_sequence(self, output: Any) -> Any:
        """The inverse, of what ``pipeline_output`` gave; collective over cp."""
        assert self.context_parallel is not None
        return self.context_parallel.join_tree(output)

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        """The batch as ``count`` microbatches: any pytree of tensors, on dim 0."""
        return split_batch(batch, count)

    def stage_inputs(self, microbatch: Any) -> tuple[Any, ...]:
        """What the first stage takes: the entry ``input_ids`` of a dict, or the first of a sequence, or the batch itself."""
        if isinstance(microbatch, Mapping):
            return (microbatch["input_ids"],)
        return (microbatch[0],) if isinstance(microbatch, tuple | list) else (microbatch,)

    def stage_kwargs(self, microbatch: Any) -> dict[str, Any]:
        """What every stage takes besides: positions, masks. None by default."""
        return {}

    def loss_weight(self, microbatch: Any) -> Tensor | float:
        """What the microbatch's loss counts in the mean over the global batch: unmasked tokens where there are labels, else samples."""
        if isinstance(microbatch, Mapping) and "labels" in microbatch:
            return (microbatch["labels"] != -100).sum()
        return float(len(tensor_leaves(microbatch)[0]))

    def pipeline_output(self, output: Any, microbatch: Any) -> Any:
        """What ``pipeline_forward`` gives for a microbatch, from the last stage's output."""
        return output

    def check_layout(self, dims: ParallelDims, num_stages: int) -> None:
        """Override to refuse layouts that the model cannot have; called before any process starts.

        Raises:
            ConfigError: the module does not define its stages or its loss, or has no plan for tensor parallelism.
        """
        missing = [name for name in ("build_stage", "pipeline_loss") if getattr(type(self), name) is getattr(PipelineMixin, name)]
        if missing:
            raise ConfigError(f"{type(self).__name__} must define {' and '.join(f'{name}()' for name in missing)}, as PipelineMixin needs")
        if dims.tp > 1 and not self.tensor_parallel_plan and not hasattr(self, "parallelize_stage"):
            raise ConfigError(
                f"tp={dims.tp}: {type(self).__name__} has no tensor_parallel_plan and no parallelize_stage(): define one, or set tp=1"
            )

    def check_context_parallel(self, dims: ParallelDims, method: str) -> None:
        """Override to refuse ways of splitting sequences over cp > 1; called before any process starts.

        Raises:
            ConfigError: the module does not support cp.
        """
        if type(self).apply_context_parallel is PipelineMixin.apply_context_parallel:
            raise ConfigError(
                f"cp={dims.cp}: {type(self).__name__} does not say how its attention reaches tokens on other ranks: define "
                "apply_context_parallel(), or set cp=1"
            )

    def configure_model(self) -> None:
        """Build this rank's stages, once; a later Trainer takes them as they are.

        Raises:
            ConfigError: they are not what this Trainer's strategy can take.
        """
        build = getattr(self.trainer.strategy, "build_stages", None)  # type: ignore[attr-defined]
        is_whole = self.built is None or self.built.layout.dims.world_size == 1
        if len(self.stages) and (not is_whole if build is None else self.built is None):
            raise ConfigError(
                "the weights of this module were built by a Trainer with another strategy: make a new module and load a checkpoint into it"
            )
        if build is not None:
            self.stages.update({str(index): stage for index, stage in build(self).items()})
        elif not len(self.stages):
            self.stages["0"] = self._build_whole()

    def pipeline_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a batch, the same on all ranks; with gradients enabled its backward has run when this returns."""
        step = getattr(self.trainer.strategy, "pipeline_step", None)  # type: ignore[attr-defined]
        if step is not None:
            return step(batch)
        result = self.pipeline_loss(self._forward_whole(batch), batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        weight = torch.as_tensor(self.loss_weight(batch), dtype=torch.float64, device=loss.device)
        return loss, {name: value.detach() for name, value in metrics.items()} | {"weight": weight}

    def pipeline_forward(self, batch: Any) -> list[Any]:
        """``pipeline_output`` of each microbatch of a batch, in order, on all ranks of the pipeline."""
        forward = getattr(self.trainer.strategy, "pipeline_forward", None)  # type: ignore[attr-defined]
        return forward(batch) if forward is not None else [self.pipeline_output(self._forward_whole(batch), batch)]

    def _build_whole(self) -> nn.Module:
        with torch.device("meta"):
            stage = self.build_stage(0, 1)
        self.init_stage(stage, torch.device("cpu"))
        return stage

    def _forward_whole(self, batch: Any) -> Any:
        return self.stages["0"](*self.stage_inputs(batch), **self.stage_kwargs(batch))
