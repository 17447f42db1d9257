"""The plan is a table: which module is cut how over tp, and where it communicates. To change the split, edit the table.

``shard_dim`` is the dim of the weight that is cut (0: rows, i.e. output features or vocabulary; 1: columns, i.e. input features;
None: whole on every rank), ``region`` what happens to the module's output (see parallel/tensor.py), ``divides`` the size in the
model's configuration that tp must divide. A size that is not named there may be cut unevenly (vocabulary, ffn).
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.tensor import Region, TensorParallel, parallelise_module


@dataclass(frozen=True)
class Row:
    """One line of a plan; ``modules`` is a pattern of names within a stage (``*`` and ``[qkv]`` as in a shell)."""

    modules: str
    shard_dim: int | None
    region: Region
    divides: str | None = None


LLAMA_PLAN: tuple[Row, ...] = (
    Row("embed_tokens", 0, "leave"),
    Row("layers.*.input_layernorm", None, "enter"),
    Row("layers.*.self_attn.q_proj", 0, "inside", divides="num_attention_heads"),
    Row("layers.*.self_attn.[kv]_proj", 0, "inside", divides="num_key_value_heads"),
    Row("layers.*.self_attn.o_proj", 1, "leave", divides="num_attention_heads"),
    Row("layers.*.post_attention_layernorm", None, "enter"),
    Row("layers.*.mlp.gate_proj", 0, "inside"),
    Row("layers.*.mlp.up_proj", 0, "inside"),
    Row("layers.*.mlp.down_proj", 1, "leave"),
    Row("norm", None, "enter"),
    Row("lm_head", 0, "inside"),
)


def check_plan(plan: Iterable[Row], sizes: Mapping[str, int], tp: int) -> None:
    """Whether tp divides what the plan cuts evenly.

    Raises:
        ConfigError: naming the first size that tp does not divide.
    """
    for key in sorted({row.divides for row in plan if row.divides}):
        if sizes[key] % tp:
            fits = [n for n in range(1, sizes[key] + 1) if sizes[key] % n == 0]
            raise ConfigError(f"{key}={sizes[key]} is not divisible by tp={tp}: choose tp from {fits}, or change {key}")


def apply_plan(stage: nn.Module, plan: Iterable[Row], tp: TensorParallel) -> list[str]:
    """Make the stage's modules tensor-parallel.

    Returns:
        Names within the stage of the parameters whose gradients are partial sums over tp.

    Raises:
        ConfigError: a module that owns parameters but stands in no row of the plan.
    """
    rows = list(plan)
    partial = []
    for name, module in list(stage.named_modules()):
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        row = next((row for row in rows if fnmatch.fnmatchcase(name, row.modules)), None)
        if row is None:
            raise ConfigError(f"tp={tp.size}: no row of the tensor-parallel plan matches '{name}' ({type(module).__name__}): add one")
        partial += [f"{name}.{parameter}" for parameter in parallelise_module(module, tp, row.region, row.shard_dim)]
    return partial


def render(stage: nn.Module, plan: Iterable[Row], *, tp: int, data_parallel: str, dp: int) -> str:
    """The plan as a table of text: a line a pattern, with the shape of its first parameter and its placement on each axis."""
    lines = [("parameters", "count", "shape", "dp", "tp", "output")]
    sharded = "Shard(0)" if data_parallel != "ddp" and dp > 1 else "Replicate"
    for row in plan:
        names = [name for name, _ in stage.named_modules() if fnmatch.fnmatchcase(name, row.modules)]
        for name in names[:1]:
            weight = next(stage.get_submodule(name).parameters(recurse=False))
            cut = "Replicate" if row.shard_dim is None else f"Shard({row.shard_dim})"
            shape = tuple(weight.shape)
            lines.append((row.modules, str(len(names)), str(shape), sharded, cut if tp > 1 else "Replicate", row.region))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def full_numel(stage: nn.Module) -> int:
    """Number of parameters of a stage, over all the ranks that share it."""
    return sum(p.numel() for p in stage.parameters())


def local_numel(stage: nn.Module) -> int:
    """Number of parameters of a stage that lie on this rank."""
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in stage.parameters())
