"""Causal attention over (B, S, heads, H): PyTorch's scaled_dot_product_attention, or the flash-attn package.

Both take fewer key/value than query heads, so that grouped keys and values are never copied out to N heads, but where
PyTorch has no fused kernel for that. The functions see whatever heads and tokens the caller holds and never ask the config.
Rows may hold several documents, one after the other: given where they begin, a token sees those before it in its own.
"""

from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig


class Documents:
    """Where documents begin in the rows of a microbatch, and what either function makes of it, once for all layers.

    A document begins with each row, and where a position is 0 or not the one before plus 1.
    """

    def __init__(self, position_ids: Int[Tensor, "B S"]) -> None:
        begins = torch.ones_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = (position_ids[:, 1:] != position_ids[:, :-1] + 1) | (position_ids[:, 1:] == 0)
        self.begins: Bool[Tensor, "B S"] = begins
        self._masks: dict[torch.dtype, Float[Tensor, "B 1 S S"]] = {}

    @cached_property
    def starts(self) -> Int[Tensor, "B S"]:
        """Where in the row each token's document begins."""
        index = torch.arange(self.begins.shape[1], device=self.begins.device)
        return (index * self.begins).cummax(1).values

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "B 1 S S"]:
        """What is added to the scores: 0 where a token sees another, else minus infinity. Of a bool mask PyTorch would make one a layer."""
        if dtype not in self._masks:
            numbers = self.begins.cumsum(1)
            sees = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
            self._masks[dtype] = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)
        return self._masks[dtype]

    @cached_property
    def borders(self) -> Int32[Tensor, "borders"]:
        """Where documents begin in the rows one after the other, and where the last ends."""
        flat = self.begins.flatten()
        return F.pad(flat.nonzero().flatten(), (0, 1), value=len(flat)).int()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.borders.diff().max())


def sdpa(
    q: Float[Tensor, "B S N H"], k: Float[Tensor, "B S K H"], v: Float[Tensor, "B S K H"], documents: Documents | None = None
) -> Float[Tensor, "B S N H"]:
    """Causal attention by PyTorch's own kernels, on every device and in every dtype."""
    return masked_sdpa(q, k, v, None if documents is None else documents.mask(q.dtype))


def masked_sdpa(
    q: Float[Tensor, "B S N H"], k: Float[Tensor, "B T K H"], v: Float[Tensor, "B T K H"], mask: Float[Tensor, "b 1 S T"] | None
) -> Float[Tensor, "B S N H"]:
    """The same with a mask that is added to the scores; without one, causal."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and (mask is not None or q.dtype not in (torch.float16, torch.bfloat16)):
        # CUDA's kernel for float32 and for masks takes no grouped heads: PyTorch would fall back to one that holds all S x S scores.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def flash_attn(
    q: Float[Tensor, "B S N H"], k: Float[Tensor, "B S K H"], v: Float[Tensor, "B S K H"], documents: Documents | None = None
) -> Float[Tensor, "B S N H"]:
    """Causal attention by the flash-attn package.

    Raises:
        ConfigError: the model computes in float32.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"attn_implementation: flash_attn cannot compute in {q.dtype}; set precision: bf16-mixed, or choose sdpa.")
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if documents is None:
        return flash_attn_func(q, k, v, causal=True)
    borders, longest = documents.borders, documents.longest
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn_varlen_func(*flat, borders, borders, longest, longest, causal=True).view_as(q)


def attention_function(config: LlamaConfig) -> Callable[..., Tensor]:
    """The function that `attn_implementation` names.

    Raises:
        ConfigError: it cannot run here (see `check_attention`).
    """
    check_attention(config)
    return flash_attn if config.attn_implementation == "flash_attn" else sdpa


def check_attention(config: LlamaConfig) -> None:
    """Refuse an attention that cannot run on this machine.

    Raises:
        ConfigError: flash_attn without CUDA, or without the package.
    """
    if config.attn_implementation != "flash_attn":
        return
    if not torch.cuda.is_available():
        raise ConfigError("attn_implementation: flash_attn needs a CUDA device and none is available; choose attn_implementation: sdpa.")
    if find_spec("flash_attn") is None:
        raise ConfigError("attn_implementation: flash_attn needs its package: pip install 'lightning-3d[flash]', or choose sdpa.")
