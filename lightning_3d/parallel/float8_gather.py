"""Where FSDP gathers a weight that float8 scales as a whole, it sends float8: a byte an element, and the same products, bit by bit.

One scale for all ranks' parts of a weight is what makes them one; it is worked out before each forward that is going to gather.

Source: torch's extension of FSDP2's all-gather, as torchao.float8.fsdp_utils uses it.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from lightning_3d.mesh import Mesh
from lightning_3d.parallel.data import is_reduced_by_fsdp
from lightning_3d.parallel.float8 import Float8, torchao_settings


class WeightPart:
    """A rank's part of a weight; torch calls ``before_gather`` and ``after_gather``, which it finds as attributes of the part."""

    def __init__(self, linear: nn.Module, emulate: bool) -> None:
        self._linear = linear
        self._settings, self._products = torchao_settings("tensorwise", emulate)

    @property
    def dtype(self) -> torch.dtype:
        """What is sent."""
        return self._settings.cast_config_weight.target_dtype

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
        """From now on, with this scale."""
        self._scale = scale
        part: Any = self.tensor
        part.fsdp_pre_all_gather, part.fsdp_post_all_gather = self.before_gather, self.after_gather

    def before_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What to send, and what is known of it on all ranks."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        part = hp_tensor_and_scale_to_float8(self.tensor, self._scale, self.dtype, self._products, GemmInputRole.WEIGHT)
        return (part._data,), (self._scale,)

    def after_gather(self, outputs: tuple[Tensor], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None) -> Any:
        """The weight that was received, and what holds its memory; the first time, then only its scale changes."""
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
    parts = {name: WeightPart(stage.get_submodule(name), float8.emulate) for name in names if float8.recipe == "tensorwise"}
    parts = {name: part for name, part in parts.items() if part.is_sharded and part.is_even}
    if parts:  # before FSDP's own hook, which may gather ahead
        shards = mesh.fsdp_mesh.get_group(-1)
        stage.register_forward_pre_hook(lambda stage, args: _scale_alike(parts.values(), shards), prepend=True)
    return list(parts)


@torch.no_grad()
def _scale_alike(parts: Iterable[WeightPart], shards: dist.ProcessGroup) -> None:
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
