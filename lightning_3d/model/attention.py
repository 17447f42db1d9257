"""Causal attention over (B, S, heads, H): PyTorch's scaled_dot_product_attention, or the flash-attn package.

Both take fewer key/value than query heads, so that grouped keys and values are never copied out to N heads; one case excepted,
for which PyTorch has no fused kernel. The functions see whatever heads and tokens the caller holds and never ask the config.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig


def sdpa(q: Float[Tensor, "B S N H"], k: Float[Tensor, "B S K H"], v: Float[Tensor, "B S K H"]) -> Float[Tensor, "B S N H"]:
    """Causal attention by PyTorch's own kernels, on every device and in every dtype."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # CUDA's kernel for float32 takes no grouped heads: PyTorch would fall back to one that holds all S x S scores.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def flash_attn(q: Float[Tensor, "B S N H"], k: Float[Tensor, "B S K H"], v: Float[Tensor, "B S K H"]) -> Float[Tensor, "B S N H"]:
    """Causal attention by the flash-attn package.

    Raises:
        ConfigError: the model computes in float32.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"attn_implementation: flash_attn cannot compute in {q.dtype}; set precision: bf16-mixed, or choose sdpa.")
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


def attention_function(config: LlamaConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
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
