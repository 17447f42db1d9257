"""Keys and values of the tokens before, so that the next one costs one token's work.

The model stays as it is: what attends in each of its layers is swapped for a function that remembers. Positions are given with the
tokens, so that queries and keys are turned as they would be in one pass over all of them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lightning_3d.model.attention import Documents, sdpa
from lightning_3d.model.llama import Attention, LlamaStage

PIECE_TOKENS = 512  # with a vocabulary of 128,256 their logits take 0.26 GB in float32


class CachedAttention:
    """The attention of one layer for one sequence, which grows to ``capacity`` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._keys: Float[Tensor, "1 C K H"] | None = None
        self._values: Float[Tensor, "1 C K H"] | None = None

    def __call__(
        self, q: Float[Tensor, "1 S N H"], k: Float[Tensor, "1 S K H"], v: Float[Tensor, "1 S K H"], documents: Documents | None = None
    ) -> Float[Tensor, "1 S N H"]:
        """Attend to the tokens before and, causally, to the new ones."""
        if self._keys is None or self._values is None:
            shape = (1, self.capacity, *k.shape[2:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        begin, self.length = self.length, self.length + k.shape[1]
        self._keys[:, begin : self.length], self._values[:, begin : self.length] = k, v
        if not begin:
            return sdpa(q, k, v)
        keys, values = (held[:, : self.length].transpose(1, 2) for held in (self._keys, self._values))
        sees = torch.ones(q.shape[1], self.length, dtype=torch.bool, device=q.device).tril(begin) if q.shape[1] > 1 else None
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, sees, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


class Decoder:
    """A whole model that reads a sequence piece by piece: the prompt, then each token as it is chosen.

    Args:
        model: all layers, with embedding and head; its attention is this decoder's from now on.
        capacity: the longest sequence, in tokens.
    """

    def __init__(self, model: LlamaStage, capacity: int) -> None:
        assert model.first
        assert model.last
        self._model, self._position = model, 0
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.attend = CachedAttention(capacity)

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Float[Tensor, "V"]:
        """Logits of the token that follows these; a long text is read in pieces, since each token has logits."""
        for begin in range(0, len(ids), PIECE_TOKENS):
            logits = self._read(ids[begin : begin + PIECE_TOKENS])
        return logits

    def _read(self, ids: Sequence[int]) -> Float[Tensor, "V"]:
        device = next(self._model.parameters()).device
        tokens: Int[Tensor, "1 S"] = torch.tensor([list(ids)], device=device)
        positions = torch.arange(self._position, self._position + tokens.shape[1], device=device)[None]
        self._position += tokens.shape[1]
        return self._model(tokens, positions)[0, -1]
