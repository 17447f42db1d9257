"""Recomputation: keep less of the forward, and compute it again when the backward needs it.

    none        keep everything
    full        of each block keep its input alone: memory of one block at a time, a third more compute
    selective   keep the outputs of matrix products and attention, and compute the rest again (norms, activations, rotations), which is
                cheap to repeat and half of what a block keeps
    n           full, in every n-th block

What is repeated includes a block's collectives over tp, in the
same order on all its ranks. Numbers are the same, bit by bit.

Source: Chen et al. 2016 (Training deep nets with sublinear memory cost); selective: Korthikanti et al. 2022 (Reducing Activation
Recomputation), section 5.
"""

from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.blocks import blocks_of

Recompute = Literal["none", "full", "selective"] | int

_ATEN = torch.ops.aten
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


def check_recompute(mode: Recompute) -> None:
    """Refuse what is no mode.

    Raises:
        ConfigError: neither none, full nor selective, nor a number of at least 1.
    """
    if mode not in ("none", "full", "selective") and (not isinstance(mode, int) or isinstance(mode, bool) or mode < 1):
        raise ConfigError(f"recompute={mode!r}: choose none, full, selective, or a number n of at least 1 for every n-th block")


def recompute_blocks(stage: nn.Module, mode: Recompute) -> None:
    """Let a stage's blocks recompute; by a subclass of their own class, so that all names stay."""
    if mode == "none":
        return
    for block in list(blocks_of(stage))[:: mode if isinstance(mode, int) else 1]:
        cls: Any = type(block)
        block.__class__ = _subclass(cls, keeps=mode == "selective")


@cache  # torch.compile takes a class of its own for other code
def _subclass(cls: type[nn.Module], *, keeps: bool) -> type[nn.Module]:
    options: dict[str, Any] = {"use_reentrant": False}
    if keeps:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return checkpoint(cls.forward, self, *args, **options, **kwargs)

    return type(f"Recomputed{cls.__name__}", (cls,), {"forward": forward})
