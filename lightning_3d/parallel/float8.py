"""Float8: the products of chosen linears in 8 bits, through torchao; weights, their gradients and all else stay as they are.

    tensorwise  one scale for a whole tensor: the fastest; e4m3 forward, e5m2 for gradients
    rowwise     a scale for each row or column: more exact; e4m3 throughout

Scales are taken from the values at each product, and are powers of 2: a rank that scales only what it holds under tp then rounds as one
process does, but for the smallest values, and nothing has to be sent. Only linears of the blocks are converted: a head in float8 costs
more loss than it saves time. A linear whose sizes are no multiples of 16, as the hardware needs, stays as it is.

Where FSDP gathers a weight that is scaled as a whole, it sends float8: a quarter of float32's bytes, and the same products, bit by bit.

Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning); torchao.float8.
"""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.parallel.blocks import blocks_of
from lightning_3d.parallel.data import is_reduced_by_fsdp

Recipe = Literal["tensorwise", "rowwise"]
CAPABILITY = (8, 9)  # of CUDA devices that multiply in float8: Ada, Hopper and later
MULTIPLE = 16


@dataclass(frozen=True)
class Float8:
    """Which linears are computed in float8, and how.

    Args:
        recipe: what has a scale of its own.
        filter: patterns of names within a stage (``layers.*.mlp.*``); of the blocks' linears, those that match one are converted.
        emulate: round to float8 and multiply as before: the numbers without the speed, on any device.
    """

    recipe: Recipe = "tensorwise"
    filter: tuple[str, ...] = ("*",)
    emulate: bool = False


def check_float8(float8: Float8 | None, device: torch.device) -> None:
    """Refuse what cannot run here.

    Raises:
        ConfigError: an unknown recipe, no torchao, or a device that cannot multiply in float8.
    """
    if float8 is None:
        return
    if float8.recipe not in get_args(Recipe):
        raise ConfigError(f"float8.recipe={float8.recipe!r}: choose from {list(get_args(Recipe))}")
    if find_spec("torchao") is None:
        raise ConfigError("float8 needs torchao, which is not there: pip install 'lightning-3d[float8]', or leave float8 out")
    if not float8.emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY):
        raise ConfigError(
            f"float8 needs a CUDA device of capability 8.9 or more, and this is {device}: set float8.emulate to true, or leave it out"
        )


def convert_linears(stage: nn.Module, float8: Float8 | None, tp: int) -> list[str]:
    """Let the chosen linears of a stage's blocks compute in float8, by a subclass of their own class; before they are cut over tp.

    Returns:
        Their names.
    """
    if float8 is None:
        return []
    names = {id(module): name for name, module in stage.named_modules()}
    linears = {names[id(m)]: m for block in blocks_of(stage) for m in block.modules() if isinstance(m, nn.Linear)}
    chosen = [name for name in linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in float8.filter)]
    fit = [name for name in chosen if float8.emulate or _fits(linears[name], tp)]
    for name in fit:
        cls: Any = type(linears[name])
        made: Any = _subclass(cls, float8.recipe, float8.emulate)
        linears[name].__class__ = made
    return fit


def _fits(linear: nn.Linear, tp: int) -> bool:
    """Whether either dim may be cut over tp and still be what the hardware takes."""
    return linear.in_features % (MULTIPLE * tp) == 0 and linear.out_features % (MULTIPLE * tp) == 0


@cache
def _config(recipe: Recipe, emulate: bool) -> tuple[Any, Any]:
    """The settings of torchao for casts, and of the three products."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    convert_to_float8_training(nn.ModuleList())  # nothing to convert; but it works around a fault of inductor's in float8 kernels
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, round_scales_to_power_of_2=True)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return config, LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms))


@cache  # one class for all linears of a kind: torch.compile takes another class for other code
def _subclass(cls: type[nn.Module], recipe: Recipe, emulate: bool) -> type[nn.Module]:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config, products = _config(recipe, emulate)

    def forward(self: Any, x: Float[Tensor, "B S I"]) -> Float[Tensor, "B S O"]:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, self.weight.to(x.dtype).t(), products, config)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    return type(f"Float8{cls.__name__}", (cls,), {"forward": forward})


# ---- all-gathers of FSDP -------------------------------------------------------------------------------------------------


class _Part:
    """A rank's part of a weight, as FSDP sends and receives it: torch calls these two methods as attributes of the part.

    Source: torch's extension of FSDP2's all-gather, as torchao.float8.fsdp_utils uses it.
    """

    def __init__(self, linear: nn.Module, emulate: bool) -> None:
        self._linear = linear
        self._config, self._products = _config("tensorwise", emulate)
        self._scale = torch.ones(())

    @property
    def dtype(self) -> torch.dtype:
        """That is sent."""
        return self._config.cast_config_weight.target_dtype

    @property
    def is_sharded(self) -> bool:
        """Whether the weight will be gathered before it is used next."""
        weight = self._linear._parameters["weight"]
        return weight is not None and is_reduced_by_fsdp(weight)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold as many rows: torch pads other parts, and forgets their methods."""
        weight: Any = self._linear._parameters["weight"]
        cuts = [n for placed, n in zip(weight.placements, weight.device_mesh.shape, strict=True) if getattr(placed, "dim", None) == 0]
        return bool(weight.shape[0] % math.prod(cuts) == 0)

    @property
    def tensor(self) -> Float[Tensor, "O/dp I"]:
        """The part itself; to_local() of a parameter makes a new tensor."""
        weight: Any = self._linear._parameters["weight"]
        part: Tensor = weight._local_tensor
        return part

    def send_in_float8(self, scale: Float[Tensor, ""]) -> None:
        self._scale = scale
        part: Any = self.tensor
        part.fsdp_pre_all_gather, part.fsdp_post_all_gather = self.before_gather, self.after_gather

    def before_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        part = hp_tensor_and_scale_to_float8(self.tensor, self._scale, self.dtype, self._products, GemmInputRole.WEIGHT)
        return (part._data,), (self._scale,)

    def after_gather(self, outputs: tuple[Tensor], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None) -> Any:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        if out is None:
            return Float8TrainingTensor(outputs[0], scales[0], dtype, self._products, GemmInputRole.WEIGHT), outputs
        getattr(out, "_local_tensor", out)._scale = scales[0]  # under tp it is a DTensor of that
        return None


def gather_in_float8(stage: nn.Module, names: Iterable[str], float8: Float8, mesh: Mesh) -> list[str]:
    """Let FSDP send the weights of converted linears in float8.

    Returns:
        The names of those linears: under ``tensorwise`` all whose rows the ranks share evenly, under ``rowwise`` none.
    """
    parts = {name: _Part(stage.get_submodule(name), float8.emulate) for name in names if float8.recipe == "tensorwise"}
    parts = {name: part for name, part in parts.items() if part.is_sharded and part.is_even}
    if parts:  # before FSDP's own hook, which may gather ahead
        shards = mesh.fsdp_mesh.get_group(-1)
        stage.register_forward_pre_hook(lambda stage, args: _scale_alike(parts.values(), shards), prepend=True)
    return list(parts)


@torch.no_grad()
def _scale_alike(parts: Iterable[_Part], shards: dist.ProcessGroup) -> None:
    """One scale for all parts of a weight, for each weight that the forward is going to gather.

    Shapes: any.
    Placement: each part's largest value -> replicated over dp.
    Communication: all-reduce, shards of dp, 4 bytes a weight.
    Source: torchao.float8 (float8 all-gather).
    """
    from torchao.float8.float8_utils import amax_to_scale

    sharded = [part for part in parts if part.is_sharded]
    if sharded:
        largest = torch.stack(torch._foreach_norm([part.tensor for part in sharded], math.inf)).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shards)
        scales = amax_to_scale(largest, sharded[0].dtype, round_scales_to_power_of_2=True)
        for part, scale in zip(sharded, scales.unbind(), strict=True):
            part.send_in_float8(scale)


def described(names: Iterable[str], float8: Float8, gathered: Iterable[str] = ()) -> str:
    """One line: which linears, how they are computed, and for how many FSDP sends float8."""
    patterns = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    which = ", ".join(f"{count} {pattern}" for pattern, count in patterns.items()) or "no linear"
    how = f"{which}; {float8.recipe} scales, {'emulated' if float8.emulate else 'multiplied in float8'}"
    return f"{how}, {count} gathered in float8" if (count := len(list(gathered))) else how
