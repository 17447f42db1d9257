"""LlamaConfig: what it refuses and in which words, how it reads Hugging Face's files, and what it counts."""

import json
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage

DATA = Path(__file__).parents[1] / "data"
TINY = {"vocab_size": 33, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 0}, ["hidden_size: 0"]),
        ({"num_key_value_heads": -2}, ["num_key_value_heads: -2"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads: 4", "num_key_value_heads: 3"]),
        ({"hidden_size": 26}, ["hidden_size: 26", "num_attention_heads: 4", "head_dim"]),
        ({"head_dim": 5}, ["head_dim: 5", "even"]),
        ({"hidden_size": 20}, ["head_dim: 5", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act: gelu", "silu"]),
        ({"attn_implementation": "eager"}, ["attn_implementation: eager", "sdpa or flash_attn"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_scaling", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "['factor']", "[]"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, ["linear", "beta"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor", "'2'", "number"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "greater than 0"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor: 1.0", "low_freq_factor: 1.0"]),
        ({"rope_scaling": {"factor": 2.0}}, ["default", "factor"]),
    ],
)
def test_refuses_what_cannot_work_in_one_line_with_keys_and_values(overrides, words):
    with pytest.raises(ConfigError) as error:
        LlamaConfig(**{**TINY, **overrides})
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("folder", sorted(DATA.glob("hf_llama_*")), ids=lambda path: path.name)
def test_reads_transformers_5_files(folder):
    raw = json.loads((folder / "config.json").read_text())
    config = LlamaConfig.from_hf(raw)
    assert (config.hidden_size, config.head_size, config.kv_heads) == (64, raw["head_dim"], raw["num_key_value_heads"])
    assert config.rope_theta == raw["rope_parameters"]["rope_theta"]
    assert config.tie_word_embeddings == raw["tie_word_embeddings"]
    kind = raw["rope_parameters"]["rope_type"]
    assert (config.rope_scaling or {"rope_type": "default"})["rope_type"] == kind
    assert config.rope_scaling is None or "rope_theta" not in config.rope_scaling


def test_reads_the_older_form_too():
    old = LlamaConfig.from_hf({**TINY, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = LlamaConfig.from_hf({**TINY, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    assert (old.rope_theta, old.rope_scaling) == (5e5, {"type": "linear", "factor": 2.0})
    assert (new.rope_theta, new.rope_scaling) == (5e5, {"rope_type": "linear", "factor": 2.0})
    assert LlamaConfig.from_hf({**TINY, "rope_scaling": None}) == LlamaConfig(**TINY)
    assert LlamaConfig.from_hf({**TINY, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}) == LlamaConfig(**TINY)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"model_type": "mistral"}, ["mistral"]),
        ({"attention_dropout": 0.1}, ["attention_dropout: 0.1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor: 0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            ["rope_scaling and rope_parameters"],
        ),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_act": "gelu"}, ["hidden_act: gelu"]),
    ],
)
def test_refuses_hugging_face_features_it_lacks(extra, words):
    with pytest.raises(ConfigError) as error:
        LlamaConfig.from_hf({**TINY, **extra})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_dim", [None, 10])
def test_counts_are_the_models(tied, biased, head_dim):
    shape = {**TINY, "num_key_value_heads": 2, "head_dim": head_dim, "attention_bias": biased, "mlp_bias": biased}
    config = LlamaConfig(**shape, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = LlamaStage(config, range(3), first=True, last=True)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert config.layer_parameters == sum(p.numel() for p in model.layers["0"].parameters())
    matrices = [p for p in model.layers["0"].parameters() if p.dim() == 2]
    assert config.layer_matmul_parameters == sum(p.numel() for p in matrices)


def test_flops_follow_the_named_conventions():
    config = LlamaConfig(**TINY, tie_word_embeddings=True)
    matmul = 3 * config.layer_matmul_parameters + 33 * 24
    assert config.flops_per_token(128, causal=False) == 6 * matmul + 3 * 12 * 24 * 128
    assert config.flops_per_token(128, causal=True) == 6 * matmul + 3 * 6 * 24 * 128


def test_the_figures_of_llama_3_8b():
    config = LlamaConfig(128256, 4096, 14336, 32, 32, num_key_value_heads=8)
    assert config.num_parameters == 8_030_261_248
    assert round(config.embedding_parameters / config.layer_matmul_parameters, 1) == 2.4


def test_a_yaml_file_can_hold_it(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--model", type=LlamaConfig)
    path = tmp_path / "model.yaml"
    path.write_text("model: {hidden_size: 64, num_attention_heads: 8, head_dim: 16, rope_scaling: {rope_type: linear, factor: 4}}")
    model = parser.instantiate(parser.parse_args(["--config", str(path), "--model.num_key_value_heads=2"])).model
    assert model == LlamaConfig(
        hidden_size=64, num_attention_heads=8, head_dim=16, num_key_value_heads=2, rope_scaling={"rope_type": "linear", "factor": 4}
    )
