"""What is refused before any process starts: a module or data that cannot run in a layout."""

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.async_tensor import check_async_tensor_parallel
from lightning_3d.parallel.schedules import check_engine
from lightning_3d.parallel.stages import Layout
from lightning_3d.placement import head_tail


def check_run(module: Any, datamodule: Any, layout: Layout, device: torch.device, *, engine: str, microbatches: int) -> None:
    """Whether the module can run on this data in this layout.

    Raises:
        ConfigError: a number of microbatches that the schedule cannot run, offloading without shards, a setting without effect, a module
            that does not say how it is split over pp, tp or cp, or what the module itself refuses.
    """
    dims = layout.dims
    check_engine(engine, pp=dims.pp, virtual_stages=layout.num_stages // dims.pp, microbatches=microbatches)
    if layout.cpu_offload and (layout.data_parallel == "ddp" or dims.dp_cp == 1):
        raise ConfigError(
            f"cpu_offload=True with data_parallel={layout.data_parallel}, dp={dims.dp}, cp={dims.cp}: it offloads shards over dp x cp; set "
            "data_parallel to fsdp, hsdp or zero2 and dp to 2 or more, or leave cpu_offload out"
        )
    if not all(hasattr(module, name) for name in ("build_stage", "pipeline_loss", "pipeline_step")):
        _check_plain(module, layout)
    if layout.async_tensor_parallel:
        check_async_tensor_parallel(dims.tp, sequence_parallel=layout.sequence_parallel, mode=layout.compile, device=device)
    lengths = getattr(datamodule, "sequence_lengths", None) or [getattr(datamodule, "sequence_length", 0)]
    for length in lengths:
        if dims.cp > 1:
            head_tail(length, dims.cp, 0)
        if layout.sequence_parallel and length % (dims.cp * dims.tp):
            size = f"cp x tp = {dims.cp * dims.tp}" if dims.cp > 1 else f"tp={dims.tp}"
            raise ConfigError(f"sequence_length={length} is not divisible by {size}, as sequence_parallel: true needs: change one")
    if hasattr(module, "check_layout"):
        module.check_layout(dims, layout.num_stages)
    if dims.cp > 1:
        module.check_context_parallel(dims, layout.cp_method)
    if hasattr(module, "check_data"):
        module.check_data(datamodule)


def _check_plain(module: Any, layout: Layout) -> None:
    """A module that is no ``PipelineMixin`` may have its own parallelism in ``configure_model``, but no pipeline."""
    name, dims = type(module).__name__, layout.dims
    if dims.pp > 1:
        raise ConfigError(
            f"pp={dims.pp}: {name} does not say what its stages are: derive it from PipelineMixin and define build_stage() and "
            "pipeline_loss(), or set pp=1"
        )
    if dims.tp > 1 and not is_overridden("configure_model", module):
        raise ConfigError(
            f"tp={dims.tp}: {name} does not say how it is cut: derive it from PipelineMixin and give it a tensor_parallel_plan, "
            "define configure_model(), or set tp=1"
        )
    if dims.cp > 1:
        raise ConfigError(
            f"cp={dims.cp}: {name} does not say how its attention reaches tokens on other ranks: derive it from PipelineMixin and define "
            "apply_context_parallel(), or set cp=1"
        )
    for key, default in (
        ("data_parallel", "ddp"),
        ("sequence_parallel", False),
        ("async_tensor_parallel", False),
        ("compile", False),
        ("float8", None),
    ):
        value = getattr(layout, key)
        if value != default:
            raise ConfigError(
                f"{key}={value} has no effect on {name}, which is no PipelineMixin: leave it out, or do it in configure_model()"
            )
