"""Reading Hugging Face folders: single files, shards, names, and what goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_3d.errors import ConfigError
from lightning_3d.model.hf import HFWeights, from_hf_name, read_hf_config, read_hf_weights, to_hf_config, to_hf_name
from lightning_3d.model.llama import LlamaStage
from lightning_3d.seeding import fill

DATA = Path(__file__).parents[1] / "data"
UNTIED, TIED = DATA / "hf_llama_mha_untied", DATA / "hf_llama_gqa_tied"


def meta_names(folder, layers=range(3), *, first=True, last=True):
    with torch.device("meta"):
        return list(LlamaStage(read_hf_config(folder), layers, first=first, last=last).state_dict())


@pytest.fixture
def sharded(tmp_path):
    tensors = load_file(UNTIED / "model.safetensors")
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        shards["ab"[number % 2] + ".safetensors"][name] = tensor
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(UNTIED / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", sorted(DATA.glob("hf_llama_*")), ids=lambda path: path.name)
def test_names_map_both_ways(folder):
    theirs = load_file(folder / "model.safetensors").keys()
    assert {to_hf_name(name) for name in meta_names(folder)} == set(theirs)
    assert all(to_hf_name(from_hf_name(name)) == name for name in theirs)


def test_shards_read_as_one_file(sharded):
    names = meta_names(UNTIED)
    whole, parts = dict(read_hf_weights(UNTIED, names)), dict(read_hf_weights(sharded, iter(names)))
    assert whole.keys() == parts.keys() == set(names)
    assert all(torch.equal(whole[name], parts[name]) for name in names)


def test_a_stage_opens_only_the_files_it_needs(sharded):
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, file in weight_map.items() if file == "a.safetensors")
    (sharded / "b.safetensors").unlink()
    assert [name for name, _ in read_hf_weights(sharded, [from_hf_name(name)])] == [from_hf_name(name)]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        next(read_hf_weights(tmp_path, []))
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's parameters, layers.3.mlp.up_proj.weight"):
        next(read_hf_weights(UNTIED, ["norm.weight", "layers.3.mlp.up_proj.weight"]))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_hf_config(tmp_path)


def whole(folder):
    weights = HFWeights(folder)
    with torch.device("meta"):
        model = LlamaStage(weights.config, range(weights.config.num_hidden_layers), first=True, last=True)
    fill(model, torch.device("cpu"), weights.read)
    return model


@pytest.fixture
def changed(tmp_path):
    """Makes a copy of a folder with another config.json and other weights."""

    def make(source=UNTIED, tensors=lambda held: held, **config):
        folder = shutil.copytree(source, tmp_path / "folder", dirs_exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
        return folder

    return make


def test_part_of_a_parameter():
    whole = load_file(UNTIED / "model.safetensors")["model.embed_tokens.weight"]
    weights = HFWeights(UNTIED)
    assert torch.equal(weights.read("embed_tokens.weight", (slice(5, 9), slice(2, 60))), whole[5:9, 2:60])
    assert torch.equal(weights.read("embed_tokens.weight"), whole)
    assert weights.dtype("embed_tokens.weight") == torch.float32


@pytest.mark.parametrize("old_rope", [False, True])
def test_a_mistral_without_sliding_window_is_a_llama(tmp_path, old_rope):
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
    torch.manual_seed(0)
    theirs = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, sliding_window=None, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path)
    if old_rope:
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": 10000.0}))
    ids = torch.randint(0, 60, (2, 30))
    with torch.inference_mode():
        torch.testing.assert_close(whole(tmp_path)(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


REFUSED = "is not a Llama; only llama, and mistral without sliding_window, can be read."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen2"}, f"model_type: qwen2 {REFUSED}"),
        ({"model_type": "gemma"}, f"model_type: gemma {REFUSED}"),
        ({"model_type": "mixtral"}, f"model_type: mixtral {REFUSED}"),
        ({"model_type": "smollm3"}, f"model_type: smollm3 {REFUSED}"),
        ({"model_type": "mistral"}, f"model_type: mistral with sliding_window: 4096 {REFUSED}"),
        ({"model_type": "mistral", "sliding_window": 128}, f"model_type: mistral with sliding_window: 128 {REFUSED}"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu is not supported; choose silu."),
    ],
)
def test_other_families_are_refused_by_name(changed, config, message):
    folder = changed(**config)
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    assert str(error.value) == f"{folder}/config.json: {message}"


def test_parameters_must_be_those_of_the_config(changed, sharded):
    with pytest.raises(ConfigError, match=r"lacks 9 of the model's parameters, layers\.3\.input_layernorm\.weight among them"):
        HFWeights(changed(num_hidden_layers=4))
    with pytest.raises(ConfigError, match=r"holds layers\.2\.input_layernorm\.weight, which a Llama of its config\.json lacks"):
        HFWeights(changed(num_hidden_layers=2))
    with pytest.raises(ConfigError, match=r"folder: lm_head\.weight has shape \(320, 64\), by its config\.json \(400, 64\)"):
        HFWeights(changed(vocab_size=400))
    (sharded / "b.safetensors").write_bytes((sharded / "b.safetensors").read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read \(.*\); download it again"):
        HFWeights(sharded)
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors does not exist, though the folder's index names it; download it again"):
        HFWeights(sharded)


def test_what_old_files_hold_besides_is_passed_over(changed):
    """Frequencies that are computed, and a head that is the embedding again."""

    def old(held):
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        return held | frequencies | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}

    assert torch.equal(whole(changed(TIED, old)).embed_tokens.weight, load_file(TIED / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("folder", sorted(DATA.glob("hf_llama_*")), ids=lambda path: path.name)
def test_config_is_written_as_it_is_read(folder, tmp_path):
    """By us and by transformers, which takes its own ids of special tokens where none are given."""
    from transformers import AutoConfig

    content = to_hf_config(read_hf_config(folder), torch.bfloat16, eos_token_id=7)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert vars(read_hf_config(tmp_path)) == vars(read_hf_config(folder))
    ours, theirs = AutoConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id, ours.dtype) == (None, 7, torch.bfloat16)
    same = {"rope_parameters", "hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "vocab_size"}
    assert {key: getattr(ours, key) for key in same} == {key: getattr(theirs, key) for key in same}
