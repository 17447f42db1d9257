"""The model's shape, in the field names of Hugging Face's Llama config, so that a `config.json` and our YAML read alike.

The defaults are Hugging Face's too (a Llama 7B). Whatever `transformers` would honour in a `config.json` is honoured here or
refused, never ignored: a RoPE scaling that goes unread trains a model that nobody else can run.

Sizes counted here feed three readers: the balanced pipeline split, the throughput callback and the tables printed before a run.
Llama 3.1 8B (D 4096, 32 layers, F 14336, K 8, V 128256): 8.03e9 parameters, 218e6 a layer, and a head that costs as much
compute as 2.4 layers, which is why a pipeline split by layer count alone is lopsided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_3d.errors import ConfigError

MISTRAL_DEFAULTS = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
ROPE_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama's shape and mathematics.

    Args:
        vocab_size: V, ids in the embedding and in the head.
        hidden_size: D, width of the residual stream.
        intermediate_size: F, width of the SwiGLU feed-forward.
        num_hidden_layers: number of blocks.
        num_attention_heads: N, query heads.
        num_key_value_heads: K, key and value heads; null means N.
        head_dim: H; null means hidden_size / num_attention_heads.
        max_position_embeddings: the longest sequence that the model is meant for, in tokens.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: null, or `{rope_type: linear, factor: 4.0}`, or `rope_type: llama3` with its four numbers.
        tie_word_embeddings: the head's weight is the embedding's.
        initializer_range: standard deviation of the initial weights of linears and embeddings.
        attention_bias: biases in q_proj, k_proj, v_proj and o_proj.
        mlp_bias: biases in gate_proj, up_proj and down_proj.
        hidden_act: silu, the only one.
        attn_implementation: sdpa runs everywhere; flash_attn needs CUDA and the `flash` extra.

    Raises:
        ConfigError: a size is not positive, heads do not divide, or a value is not supported.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attn_implementation: str = "sdpa"

    def __post_init__(self) -> None:
        self._check_sizes()
        _check_choice("hidden_act", self.hidden_act, ("silu",))
        _check_choice("attn_implementation", self.attn_implementation, ("sdpa", "flash_attn"))
        _check_rope_scaling(self.rope_scaling)

    def _check_sizes(self) -> None:
        for key, value in vars(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{key}: {value} must be greater than 0.")
        heads = self.num_attention_heads
        if heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads: {heads} is not a multiple of num_key_value_heads: {self.kv_heads}; "
                "each key/value head serves the same number of query heads."
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ConfigError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads: {heads}; change one, or set head_dim."
            )
        if self.head_size % 2:
            raise ConfigError(f"head_dim: {self.head_size} is odd; rotary embeddings turn pairs, so make it even.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **overrides: Any) -> LlamaConfig:
        """Read a Hugging Face `config.json`: the form with rope_theta and rope_scaling, and transformers 5's rope_parameters.

        Besides Llama's it takes Mistral's without a sliding window, which is a Llama by another name.

        Raises:
            ConfigError: it describes another model, or a feature that this Llama lacks.
        """
        if config.get("model_type") == "mistral":
            config = MISTRAL_DEFAULTS | dict(config)
        _refuse_hf(config)
        theta, scaling = _hf_rope(config)
        names = {field.name for field in fields(cls)} - {"rope_theta", "rope_scaling", "attn_implementation"}
        known = {name: config[name] for name in names & config.keys()}
        return cls(**{**known, "rope_theta": theta, "rope_scaling": scaling, **overrides})

    @property
    def kv_heads(self) -> int:
        """K: key and value heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """H: width of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights that a token is multiplied with in one block."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_attention_heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: matmul weights, two norms, biases."""
        attention_biases = self.head_size * (self.num_attention_heads + 2 * self.kv_heads) + self.hidden_size
        mlp_biases = 2 * self.intermediate_size + self.hidden_size
        biases = attention_biases * self.attention_bias + mlp_biases * self.mlp_bias
        return self.layer_matmul_parameters + 2 * self.hidden_size + biases

    @property
    def embedding_parameters(self) -> int:
        """V x D: parameters of the embedding, and of the head's matmul, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden_size

    def layer_flops_per_token(self, sequence_length: int, *, causal: bool) -> int:
        """Floating-point operations of one block, forward and backward, per token: `flops_per_token` says what counts."""
        scores = 12 * self.num_attention_heads * self.head_size * sequence_length
        return 6 * self.layer_matmul_parameters + (scores // 2 if causal else scores)

    @property
    def head_flops_per_token(self) -> int:
        """Floating-point operations of the head's matmul, forward and backward, per token."""
        return 6 * self.embedding_parameters

    def flops_per_token(self, sequence_length: int, *, causal: bool) -> int:
        """Floating-point operations of the model, forward and backward, per token.

        Counted: 6 per matmul weight (the head's too, the embedding's lookup not) plus attention's two products, 12 N H S a layer
        as if every token saw all S (`causal=False`: the convention of the PaLM paper, TorchTitan and Nanotron) or half of that, the
        part that a causal model needs (`causal=True`: Megatron-LM's). Recomputation, norms and softmax never count.
        """
        return self.num_hidden_layers * self.layer_flops_per_token(sequence_length, causal=causal) + self.head_flops_per_token


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}: {value} is not supported; choose {' or '.join(choices)}.")


def _check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    if scaling is None:
        return
    kind = rope_type(scaling)
    if kind not in ROPE_SCALING_KEYS:
        raise ConfigError(f"rope_scaling: rope_type {kind} is not supported; choose {', '.join(ROPE_SCALING_KEYS)}, or null.")
    wanted, given = set(ROPE_SCALING_KEYS[kind]), scaling.keys() - {"rope_type", "type"}
    if wanted != given:
        raise ConfigError(f"rope_scaling: rope_type {kind} takes exactly the keys {sorted(wanted)}, but has {sorted(given)}.")
    for key in ROPE_SCALING_KEYS[kind]:
        if isinstance(scaling[key], bool) or not isinstance(scaling[key], (int, float)) or scaling[key] <= 0:
            raise ConfigError(f"rope_scaling: {key}: {scaling[key]!r} must be a number greater than 0.")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        raise ConfigError(f"rope_scaling: high_freq_factor: {high} must be greater than low_freq_factor: {low}.")


def rope_type(scaling: Mapping[str, Any]) -> str:
    """The kind of RoPE scaling: `rope_type`, or `type` as older files call it."""
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _refuse_hf(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type", "llama")
    window = config.get("sliding_window") if kind == "mistral" else None
    if kind not in ("llama", "mistral") or window is not None or config.get("layer_types") is not None:
        model = f"{kind} with sliding_window: {window}" if window else kind
        raise ConfigError(f"config.json: model_type: {model} is not a Llama; only llama, and mistral without sliding_window, can be read.")
    neutral = {"attention_dropout": (None, 0), "partial_rotary_factor": (None, 1), "quantization_config": (None,)}
    for key, values in neutral.items():
        if config.get(key) not in values:
            raise ConfigError(f"config.json: {key}: {config[key]} is not supported; remove it, or take a model without it.")


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base frequency and the scaling, which transformers 5 keeps together in `rope_parameters`."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new:
        raise ConfigError("config.json: rope_scaling and rope_parameters are both there; keep the one that is meant.")
    scaling = dict(old or new or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]
    plain = rope_type(scaling) == "default" and scaling.keys() <= {"rope_type", "type"}
    return float(theta), None if plain else scaling
