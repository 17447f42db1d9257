"""Reading Hugging Face folders: single files, shards, names, and what goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_3d.errors import ConfigError
from lightning_3d.model.hf import from_hf_name, read_hf_config, read_hf_weights, to_hf_name
from lightning_3d.model.llama import LlamaStage

DATA = Path(__file__).parents[1] / "data"
UNTIED = DATA / "hf_llama_mha_untied"


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
