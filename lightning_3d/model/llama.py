"""A Llama, whole or in stages, in plain PyTorch.

A stage is some consecutive layers, with the embedding before the first and the norm and head after the last; the whole model is the
one stage that has all of it. Every name is global (`layers.17` is layer 17 on whichever stage it lives), so the state dicts of all
stages simply add up to the whole model's.

Three habits let others shard this code without touching it: the number of heads is read off the projections' outputs and the
sequence length off the queries or the positions, never off the config or the stage's input; leaf modules do all the parameter work, so
a leaf can be swapped; and there are no buffers.
"""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_3d.model.attention import Documents, attention_function
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.rope import RotaryTables, rotate


class Linear(nn.Linear):
    """A linear whose weights start normal with standard deviation `std` and whose bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        self.std = std  # before nn.Linear's constructor, which draws the weights
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the weights anew from the global generator."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that can also serve as the head: tied weights stay one module, with one name, on any stage."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the weights anew from the global generator."""
        nn.init.normal_(self.weight, std=self.std)

    def attend(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Logits: the product of each hidden state with each token's embedding."""
        return F.linear(x, self.weight)


class Positions:
    """Positions that come with the tokens: how queries and keys are turned, and where documents begin.

    Made once for all layers of a stage. As a plain object it reaches them as it is: tensors may be cast on the way into a module.
    """

    def __init__(self, position_ids: Int[Tensor, "B S"], rope: RotaryTables) -> None:
        self.turn = rope(position_ids.shape[1], position_ids.device, position_ids)
        self.documents = Documents(position_ids)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LlamaConfig, rope: RotaryTables) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.rope = rope
        self.attend: Callable[..., Tensor] = attention_function(config)
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.kv_heads * self.head_dim
        bias, std = config.attention_bias, config.initializer_range
        self.q_proj = Linear(config.hidden_size, q_size, bias=bias, std=std)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=bias, std=std)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=bias, std=std)
        self.o_proj = Linear(q_size, config.hidden_size, bias=bias, std=std)

    def forward(self, x: Float[Tensor, "B s D"], positions: Positions | None = None) -> Float[Tensor, "B t D"]:
        """Mix each token with those before it; positions count from 0 unless given."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))  # (B, S, heads, H)
        cos, sin = self.rope(q.shape[1], q.device) if positions is None else positions.turn
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, positions and positions.documents)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU: silu(gate) x up, then down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, ffn, bias, std = config.hidden_size, config.intermediate_size, config.mlp_bias, config.initializer_range
        self.gate_proj = Linear(hidden, ffn, bias=bias, std=std)
        self.up_proj = Linear(hidden, ffn, bias=bias, std=std)
        self.down_proj = Linear(ffn, hidden, bias=bias, std=std)

    def forward(self, x: Float[Tensor, "B s D"]) -> Float[Tensor, "B t D"]:
        """Apply to each token alone."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, config: LlamaConfig, rope: RotaryTables) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rope)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Float[Tensor, "B s D"], positions: Positions | None = None) -> Float[Tensor, "B s D"]:
        """Map the residual stream to itself."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStage(nn.Module):
    """Consecutive layers of a Llama: token ids or hidden states in, hidden states or logits out.

    Args:
        config: the whole model's shape.
        layers: the indices, in the whole model, of this stage's layers.
        first: has the embedding and takes token ids.
        last: has the norm and the head and gives logits.
        head_later: the last stage gives the hidden states that its head would take; whoever has them applies `head` in parts.

    Raises:
        ConfigError: the attention asked for cannot run here.
    """

    def __init__(self, config: LlamaConfig, layers: range, *, first: bool, last: bool, head_later: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.head_later = first, last, head_later
        vocab, hidden, std = config.vocab_size, config.hidden_size, config.initializer_range
        if first or (last and config.tie_word_embeddings):
            self.embed_tokens = Embedding(vocab, hidden, std=std)
        self.rope = rope = RotaryTables(config)
        self.layers = nn.ModuleDict({str(index): Block(config, rope) for index in layers})
        if last:
            self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        if last and not config.tie_word_embeddings:
            self.lm_head = Linear(hidden, vocab, bias=False, std=std)

    def forward(
        self, x: Int[Tensor, "B S"] | Float[Tensor, "B s D"], position_ids: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B t E"]:
        """Token ids (B, S) or the previous stage's hidden states; gives hidden states (B, S, D), on the last stage logits (B, S, V).

        Positions are those within documents: where they do not go on from one token to the next, attention does not either.
        """
        positions = None if position_ids is None else Positions(position_ids, self.rope)
        if self.first:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, positions)
        if not self.last:
            return x
        x = self.norm(x)
        return x if self.head_later else self.logits(x)

    @property
    def head(self) -> Linear | Embedding:
        """The module whose weight turns hidden states into logits."""
        return self.lm_head if hasattr(self, "lm_head") else self.embed_tokens

    def logits(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """What the head makes of normed hidden states."""
        return self.lm_head(x) if hasattr(self, "lm_head") else self.embed_tokens.attend(x)
