"""A run from a Hugging Face folder begins with its weights, bit by bit, in every layout; exported, they are the folder's again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_init_from import begin, fit
from ranks_resume import Layout
from safetensors.torch import load_file, save_file

from lightning_3d.__main__ import main
from lightning_3d.checkpoint import step_folder
from lightning_3d.checkpoint.export import export
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.hf import from_hf_name, read_hf_config, to_hf_name
from lightning_3d.module import LlamaModule
from lightning_3d.testing import RankPool

DATA = Path(__file__).parents[1] / "data"
TIED, UNTIED = DATA / "hf_llama_gqa_tied", DATA / "hf_llama_gqa_llama3rope"
NANOSET = DATA / "nanoset_datatrove"
TWO_RANKS = [Layout(tp=2), *(pytest.param(each, marks=pytest.mark.slow) for each in (Layout(pp=2), Layout(dp=2, mode="fsdp")))]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16 and in shards, of sizes that two ranks cannot share evenly."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("uneven")
    shape = {"vocab_size": 321, "hidden_size": 36, "intermediate_size": 45, "num_hidden_layers": 3, "head_dim": 10}
    biases = {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(TheirConfig(**shape, **biases)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("layout", TWO_RANKS, ids=str)
def test_begins_with_the_folders_weights_and_exports_them_back(layout: Layout, uneven: Path, pool: RankPool, tmp_path: Path) -> None:
    """Each rank asks for its own parts and no more."""
    saves = {str(folder): str(tmp_path / folder.name) for folder in (TIED, UNTIED, uneven)}
    ranks = pool.run(begin, layout.world_size, (layout, saves))
    for folder, path in saves.items():
        theirs = tensors_of(Path(folder))
        for seen in ranks:
            for name, weight in seen[folder]["begin"].items():
                assert torch.equal(weight, theirs[to_hf_name(name)].float()), name
            assert seen[folder]["asked"] == {name: numel for name, numel in seen[folder]["own"].items() if numel}
        assert set().union(*(seen[folder]["begin"] for seen in ranks)) == {from_hf_name(name) for name in theirs}
        out = tmp_path / f"{Path(folder).name}_exported"
        export(path, str(out), dtype="bfloat16" if folder == str(uneven) else None)
        ours = tensors_of(out)
        assert ours.keys() == theirs.keys()
        assert [name for name, tensor in ours.items() if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name])] == []
        assert read_hf_config(out) == read_hf_config(folder)


def test_a_checkpoint_wins_over_the_folder(pool: RankPool, tmp_path: Path) -> None:
    """And the shape may be left to the folder, or given."""
    folder = shutil.copytree(TIED, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 515}
    (folder / "config.json").write_text(json.dumps(config))
    wide = load_file(folder / "model.safetensors")
    wide["model.embed_tokens.weight"] = torch.randn(515, 64)
    save_file(wide, folder / "model.safetensors")
    module: dict[str, Any] = {"llama": LlamaConfig.from_hf(config), "init_from": str(folder)}
    layout, checkpoints = Layout(pp=2), str(tmp_path / "checkpoints")
    first = pool.run(fit, 2, (layout, module, str(NANOSET), checkpoints))
    again = pool.run(fit, 2, (layout, module, str(NANOSET), str(tmp_path / "again"), str(step_folder(checkpoints, 4)), 5))
    for before, after in zip(first, again, strict=True):
        for name, weight in after["begin"].items():
            assert torch.equal(before["begin"][name], wide[to_hf_name(name)])
            assert torch.equal(weight, before["end"][name])
            assert not torch.equal(weight, before["begin"][name])


def test_a_plain_trainer_begins_alike() -> None:
    module = LlamaModule(init_from=str(TIED))
    stage = module._build_whole()
    theirs = tensors_of(TIED)
    assert {to_hf_name(name) for name, _ in stage.named_parameters()} == theirs.keys()
    assert all(torch.equal(parameter, theirs[to_hf_name(name)]) for name, parameter in stage.named_parameters())


def test_neither_shape_nor_folder() -> None:
    with pytest.raises(ConfigError, match=r"^model\.llama: null: give the shape of the model, or model\.init_from"):
        LlamaModule()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 2},
            "model.llama.num_hidden_layers: 2 is not that of model.init_from: {folder}, whose config.json has 3: set",
        ),
        (
            {"rope_theta": 1e4},
            "model.llama.rope_theta: 10000.0 is not that of model.init_from: {folder}, whose config.json has 500000.0: set",
        ),
        ({"num_key_value_heads": None}, "model.llama.num_key_value_heads: 8 is not that of model.init_from: {folder}, whose"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "model.llama.rope_scaling: {{'rope_type': 'linear', 'factor': 2.0}} is not",
        ),
    ],
)
def test_a_shape_that_differs_is_named_before_anything_starts(change: dict[str, Any], message: str) -> None:
    """What does not change which numbers the weights give may differ."""
    shape = vars(read_hf_config(TIED)) | {"max_position_embeddings": 64, "initializer_range": 0.1, "head_dim": None}
    LlamaModule(LlamaConfig(**shape), init_from=str(TIED)).check_layout(ParallelDims(), 1)
    with pytest.raises(ConfigError) as error:
        LlamaModule(LlamaConfig(**shape | change), init_from=str(TIED)).check_layout(ParallelDims(), 1)
    assert str(error.value).startswith(message.format(folder=TIED))


def test_the_folder_is_all_that_fit_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        LlamaModule, "on_train_start", lambda self: begins.update({n: p.clone() for n, p in self.stages["0"].named_parameters()})
    )
    args = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.logger", "false", "--trainer.max_steps", "1"]
    data = ["--data", "SyntheticDataModule", "--data.vocab_size", "320", "--data.sequence_length", "16"]
    options = ["--trainer.strategy", "auto", "--trainer.default_root_dir", str(tmp_path), "--trainer.enable_checkpointing", "false"]
    assert main(["fit", *args, *options, "--model.init_from", str(TIED), *data]) == 0
    theirs = tensors_of(TIED)
    assert {to_hf_name(name) for name in begins} == theirs.keys()
    assert all(torch.equal(weight, theirs[to_hf_name(name)]) for name, weight in begins.items())


def test_fit_refuses_other_families_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(TIED, tmp_path / "folder")
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"qwen2"'))
    args = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.logger", "false", "--model.init_from", str(folder)]
    data = ["--data.dataset_folder", str(NANOSET), "--data.sequence_length", "16"]
    assert main(["fit", *args, *data]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set")]
    assert lines == [
        f"error: {folder}/config.json: model_type: qwen2 is not a Llama; only llama, and mistral without sliding_window, can be read."
    ]
