"""Float8: the products of chosen linears in 8 bits, through torchao; weights, their gradients and all else stay as they are.

    tensorwise  one scale for a whole tensor: the fastest; e4m3 forward, e5m2 for gradients
    rowwise     a scale for each row or column: more exact; e4m3 throughout

Scales are taken from the values at each product, and are powers of 2: a rank that scales only what it holds under tp then rounds as one
process does, but for the smallest values, and nothing has to be sent. Only linears of the blocks are converted: a head in float8 costs
more loss than it saves time. A linear whose sizes are no multiples of 16, as the hardware needs, stays as it is.

Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning); torchao.float8.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.blocks import blocks_of

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
def torchao_settings(recipe: Recipe, emulate: bool) -> tuple[Any, Any]:
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

    config, products = torchao_settings(recipe, emulate)

    def forward(self: Any, x: Float[Tensor, "B S I"]) -> Float[Tensor, "B S O"]:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, self.weight.to(x.dtype).t(), products, config)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    return type(f"Float8{cls.__name__}", (cls,), {"forward": forward})


def described(names: Iterable[str], float8: Float8, gathered: Iterable[str] = ()) -> str:
    """One line: which linears, how they are computed, and for how many FSDP sends float8."""
    patterns = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    which = ", ".join(f"{count} {pattern}" for pattern, count in patterns.items()) or "no linear"
    how = f"{which}; {float8.recipe} scales, {'emulated' if float8.emulate else 'multiplied in float8'}"
    return f"{how}, {count} gathered in float8" if (count := len(list(gathered))) else how
