"""The best layouts for a number of ranks and a memory size: those that fit, by the time that a step takes.

For each size of tp (within a node) and pp the cheapest way of fitting is taken: first without recomputation, whole copies before
shards. The global batch stays as it is.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.plan import check_plan
from lightning_3d.planning.estimate import Costs, Estimate, estimate
from lightning_3d.planning.gpus import GIB, Gpu
from lightning_3d.planning.report import layout, table
from lightning_3d.planning.setting import Setting

MAX_PP = 16


def search(module: Any, setting: Setting, gpu: Gpu) -> list[Estimate]:
    """Layouts that fit, the fastest first.

    Args:
        module: a Llama.
        setting: a run of any layout; its number of ranks, global batch and sequence length are kept.
        gpu: what each rank has.
    """
    known: Costs = {}
    found = []
    for dims, microbatches in sizes(module, setting):
        for way in ways(setting, dims, microbatches):
            try:
                made = estimate(module, way, gpu, known)
            except ConfigError:
                continue
            if made.fits:
                found.append(made)
                break
    return sorted(found, key=lambda made: made.step_s)


def sizes(module: Any, setting: Setting) -> Iterator[tuple[ParallelDims, int]]:
    """Sizes of the axes that divide heads, layers and the batch, with the number of microbatches."""
    now, llama = setting.layout.dims, module.llama
    samples = now.dp * setting.microbatches * setting.micro_batch_size
    heads = {"num_attention_heads": llama.num_attention_heads, "num_key_value_heads": llama.kv_heads}
    for tp in (size for size in (1, 2, 4, 8, 16) if size <= setting.gpus_per_node):
        for pp in (size for size in (1, 2, 4, 8, 16) if size <= min(MAX_PP, llama.num_hidden_layers)):
            ranks = tp * pp * now.cp
            if now.world_size % ranks or samples % (now.world_size // ranks * setting.micro_batch_size):
                continue
            dp = now.world_size // ranks
            microbatches = samples // (dp * setting.micro_batch_size)
            try:
                check_plan(module.tensor_parallel_plan, heads, tp)
            except ConfigError:
                continue
            if pp == 1 or microbatches >= pp:
                yield ParallelDims(pp=pp, dp=dp, cp=now.cp, tp=tp), microbatches


def ways(setting: Setting, dims: ParallelDims, microbatches: int) -> Iterator[Setting]:
    """Ways of fitting, from the cheapest to the dearest."""
    sequence = dims.tp > 1 and setting.held_tokens % dims.tp == 0
    sharded = ("fsdp" if dims.pp == 1 else "zero2",) if dims.dp_cp > 1 else ()
    base = setting.at(dims, microbatches=microbatches)
    for recompute in ("none", "selective", "full"):
        for mode in ("ddp", *sharded):
            options = {"data_parallel": mode, "sequence_parallel": sequence, "recompute": recompute}
            yield replace(base, layout=replace(base.layout, **options))


def proposals(found: list[Estimate], gpu: Gpu, most: int = 5) -> str:
    """The best as a table.

    Raises:
        ConfigError: there are none.
    """
    if not found:
        raise ConfigError(
            f"search: no layout fits {gpu.usable_nbytes / GIB:.0f} usable GiB of {gpu.name}: take more ranks, shorter sequences, cp, or a "
            "larger memory"
        )
    rows = [("layout", "microbatches", "peak GiB", "bubble", "s a step", "mfu")]
    rows += [
        (
            layout(made),
            str(made.setting.microbatches),
            f"{made.worst.peak.total / GIB:.1f}",
            f"{made.idle:.0%}",
            f"{made.step_s:.2f}",
            f"{made.mfu:.0%}",
        )
        for made in found[:most]
    ]
    return "\n".join([f"layouts that fit {gpu.usable_nbytes / GIB:.0f} usable GiB, by the time of a step", *table(rows, left=1)])
