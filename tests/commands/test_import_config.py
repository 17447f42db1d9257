"""Recipes from Nanotron's and TorchTitan's files: they say the same, run, and drop no key."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.__main__ import main
from lightning_3d.commands.importing.command import import_config
from lightning_3d.errors import ConfigError

DATA = Path(__file__).parent.parent / "data"
CONFIGS = sorted(path for path in (DATA / "configs").iterdir() if path.suffix in (".yaml", ".toml"))
TOY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def recipe_of(name: str, folder: Path) -> dict[str, Any]:
    import_config(str(DATA / "configs" / name), str(folder / "recipe.yaml"))
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def test_nanotron_as_it_is_today(tmp_path) -> None:
    recipe = recipe_of("nanotron_current.yaml", tmp_path)
    strategy, optim = recipe["trainer"]["strategy"], recipe["model"]["optim"]
    assert [strategy[key] for key in ("dp", "tp", "pp", "pp_engine", "sequence_parallel")] == [2, 2, 2, "1f1b", True]
    assert recipe["trainer"]["precision"] == "bf16-mixed"
    assert recipe["model"]["llama"]["initializer_range"] == 0.025, "init_method.std, not the unused initializer_range"
    assert optim["weight_decay_exclude_named_params"][0] == r"layers\.\d+\.input_layernorm\.weight"
    assert len(optim["weight_decay_exclude_named_params"]) == 2, (
        "Nanotron's last norm is called final_layer_norm, which .*layernorm.* is not"
    )
    assert recipe["data"]["data_stages"] == [{"start_training_step": 10, "dataset_folder": "nanoset_datatrove"}]
    assert "# Not carried over" in (tmp_path / "recipe.yaml").read_text()


def test_nanotron_of_older_times(tmp_path) -> None:
    recipe = recipe_of("nanotron_older_adam.yaml", tmp_path)
    assert recipe["data"]["dataset_folder"] == ["nanoset_datatrove", "nanoset_more"]
    assert recipe["data"]["dataset_weights"] == [0.7, 0.3]
    assert recipe["model"]["optim"]["adam_beta2"] == 0.95
    assert recipe["model"]["optim"]["lr_decay_starting_step"] == 80
    assert recipe["trainer"]["strategy"]["data_parallel"] == "zero2"
    assert recipe["trainer"]["callbacks"][-1]["init_args"]["save_initial_state"] is True


def test_torchtitan(tmp_path) -> None:
    recipe = recipe_of("torchtitan_0_2.toml", tmp_path)
    strategy, optim = recipe["trainer"]["strategy"], recipe["model"]["optim"]
    assert {"tp": 4, "pp": 2, "cp": 2, "data_parallel": "hsdp", "dp_replicate": 2, "recompute": "selective"}.items() <= strategy.items()
    assert {"pp_engine": "interleaved_1f1b", "compile": True, "async_checkpoint": True}.items() <= strategy.items()
    assert strategy["async_tensor_parallel"] is True
    assert strategy["float8"] == {"recipe": "tensorwise"}
    assert (optim["lr_decay_steps"], optim["lr_decay_starting_step"]) == (800, 200)
    assert optim["min_decay_lr"] == pytest.approx(3e-5)
    assert recipe["data"]["init_args"]["sequence_length"] == 8192
    assert recipe["data"]["init_args"]["global_batch_samples"] == 64
    old = recipe_of("torchtitan_0_1.toml", tmp_path / "old")
    assert old["model"]["optim"]["lr_warmup_steps"] == 2
    assert old["trainer"]["strategy"]["tp"] == 2
    assert old["trainer"]["enable_checkpointing"] is False


@pytest.mark.timeout(200)
@pytest.mark.parametrize("config", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_recipe_runs(config: Path, tmp_path, monkeypatch, capsys) -> None:
    """Two steps on one CPU, in this process; the layout is for others to test."""
    monkeypatch.chdir(tmp_path)
    for name, target in (
        ("nanoset_datatrove", "nanoset_datatrove"),
        ("nanoset_more", "nanoset_datatrove"),
        ("tokenizer_bpe512", "tokenizer_bpe512"),
    ):
        Path(name).symlink_to(DATA / target)
    Path("nanoset_more").unlink()
    Path("nanoset_more").symlink_to(DATA / "nanoset_datatrove_u32")
    Path("text.txt").write_text("In the beginning was the word, and the word was with all of them. " * 300)
    assert main(["import-config", str(config), "--output", "recipe.yaml"]) == 0
    capsys.readouterr()
    options = {f"model.llama.{key}": value for key, value in TOY.items()} | {"data.sequence_length": 32, "data.micro_batch_size": 1}
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    if "class_path" in recipe["data"]:
        options |= {
            "data.dataset": "text.txt",
            "data.config": "null",
            "data.streaming": "false",
            "data.eos_token": "<|endoftext|>",
            "data.num_workers": 0,
        }
    trainer = {"strategy": "auto", "devices": 1, "accelerator": "cpu", "max_steps": 2, "logger": "false", "precision": "32-true"}
    options |= {f"trainer.{key}": value for key, value in trainer.items()} | {"model.optim.lr_decay_steps": 2}
    options |= {"model.optim.lr_warmup_steps": 0, "model.optim.lr_decay_starting_step": 0}
    assert main(["fit", "--config", "recipe.yaml", *(text for key, value in options.items() for text in (f"--{key}", str(value)))]) == 0
    out = capsys.readouterr()
    assert re.search(r"  steps +2\n", out.out), out.err


NANOTRON = yaml.safe_load((DATA / "configs/nanotron_toplevel_data.yaml").read_text())


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("parallelism.expert_parallel_size", 2, ["expert_parallel_size: 2"]),
        ("model.model_config.is_qwen2_config", True, ["is_qwen2_config", "only Llamas"]),
        ("model.model_config.rope_interleaved", True, ["rope_interleaved"]),
        ("model.model_config.hiden_size", 3, ["model.model_config.hiden_size: not known"]),
        ("model.init_method.use_mup", True, ["use_mup"]),
        ("checkpoints.resume_checkpoint_path", "old", ["resume_checkpoint_path", "init_from"]),
        ("model.dtype", "float16", ["model.dtype", "float16"]),
        ("optimizer.optimizer_factory", {"name": "sgd"}, ["optimizer_factory.name: 'sgd'"]),
        ("tokens.sequnce_length", 3, ["tokens.sequnce_length: not known"]),
        ("data.dataset.sft_dataloader", True, ["sft_dataloader"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, key: str, value: Any, parts: list[str]) -> None:
    content = yaml.safe_load(yaml.safe_dump(NANOTRON))
    place = content
    *path, last = key.split(".")
    for name in path:
        place = place[name]
    place[last] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        import_config(str(tmp_path / "config.yaml"), str(tmp_path / "recipe.yaml"))
    assert [part for part in parts if part not in str(error.value)] == []
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.yaml", "general: {project: x\nparallelism: 3\n", ["a.yaml", "line 2"]),
        ("a.toml", "[model]\nname = 'llama3'\nflavor = \n", ["a.toml", "line 3"]),
        ("a.yaml", "", ["there are no keys"]),
        ("a.yaml", "{a: 1}", ["neither a Nanotron YAML"]),
        (
            "a.toml",
            "[model]\nflavor = '7B'\n[training]\n[optimizer]\nname = 'Adam'\nlearning = 3\n",
            ["'7B'", "'Adam'", "optimizer.learning: not known"],
        ),
    ],
)
def test_broken_files(tmp_path, name: str, text: str, parts: list[str]) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        import_config(str(tmp_path / name), str(tmp_path / "recipe.yaml"))
    assert [part for part in parts if part not in str(error.value)] == []
