"""What the strategy needs of Lightning's precision plugins: clipping that knows the whole model, and a place after backward.

``Trainer(precision=...)`` decides the plugin; the strategy gives it these two methods by a subclass of its own class.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
from jaxtyping import Float
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class _GlobalClipping(Precision):
    clip_norm: Callable[[Optimizer, float], None]
    clip_value: Callable[[Optimizer, float], None]
    after_backward: Callable[[], None]

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        # MixedPrecision refuses fused optimizers here for the sake of a loss scaler; bfloat16 has none.
        if isinstance(self, MixedPrecision) and self.scaler is None:
            return Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        return super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.clip_norm(optimizer, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.clip_value(optimizer, float(clip_val))

    @override
    def post_backward(self, tensor: Float[Tensor, ""], module: "pl.LightningModule") -> Float[Tensor, ""]:  # type: ignore[override]
        self.after_backward()
        return super().post_backward(tensor, module)


def with_global_clipping(
    plugin: Precision,
    *,
    clip_norm: Callable[[Optimizer, float], None],
    clip_value: Callable[[Optimizer, float], None],
    after_backward: Callable[[], None],
) -> Precision:
    """A copy of the plugin that clips through the strategy, and calls ``after_backward`` before the hook ``on_after_backward``."""
    cls = type(plugin)
    if not isinstance(plugin, _GlobalClipping):
        cls = cast(type[Precision], type(f"Global{cls.__name__}", (_GlobalClipping, cls), {}))
    plugin = copy.copy(plugin)
    plugin.__class__ = cls
    assert isinstance(plugin, _GlobalClipping)
    plugin.clip_norm, plugin.clip_value, plugin.after_backward = clip_norm, clip_value, after_backward
    return plugin
