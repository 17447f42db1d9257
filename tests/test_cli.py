"""The command line: what it takes, what it says, and what it runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.__main__ import FUNCTIONS, RECIPES, TRAINER, main
from lightning_3d.usage import one_line

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests/data"
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def recipe(**trainer: Any) -> dict[str, Any]:
    """A run of two steps under a plain strategy: the processes' groups would outlive a test."""
    folder = str(DATA / "nanoset_datatrove")
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "log_every_n_steps": 1, "strategy": "auto", "logger": False}
    return {
        "model": {"llama": dict(LLAMA), "optim": {"learning_rate": 1e-3}},
        "data": {
            "dataset_folder": folder,
            "validation_folder": folder,
            "validation_samples": 4,
            "sequence_length": 32,
            "micro_batch_size": 2,
        },
        "trainer": options | {"enable_checkpointing": False, "callbacks": [{"class_path": "Summary"}]} | trainer,
    }


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def to_file(content: dict[str, Any], name: str = "recipe.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return to_file


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    """The list in less than a tenth of the time of `import lightning.pytorch, transformers` (4 s): none of it is imported."""
    heavy = {"torch", "lightning", "transformers", "jsonargparse"}
    code = (
        f"import sys; from lightning_3d.__main__ import main\ntry: main(['--help'])\nfinally: print(sorted({heavy} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(re.search(rf"\n    {name}\s", out) for name in [*TRAINER, *RECIPES, *FUNCTIONS])


def test_each_command_has_its_options(capsys) -> None:
    for command, option in [("fit", "--ckpt_path"), ("test", "--print_plan"), ("prepare", "--tokenizer")]:
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert option in capsys.readouterr().out


def test_fit_trains(write, capsys) -> None:
    assert main(["fit", "--config", write(recipe())]) == 0
    out = capsys.readouterr().out
    assert "SingleDeviceStrategy on 1 cpu rank" in out
    assert "lm_loss" in out


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_run(write, command) -> None:
    assert main([command, "--config", write(recipe())]) == 0


def test_fragments_are_named_relative_to_the_file_that_names_them(write, capsys) -> None:
    content = recipe(strategy="../configs/one.yaml", callbacks="../configs/callbacks.yaml")
    write(content["model"].pop("llama"), "configs/llama.yaml")
    write({"dp": 1, "sequence_parallel": True}, "configs/one.yaml")
    write([{"class_path": "GradNorm"}], "configs/callbacks.yaml")
    content["model"]["llama"] = "../configs/llama.yaml"
    path = write(content, "recipes/recipe.yaml")
    assert shown(capsys, "--config", path)["model"]["init_args"]["llama"]["hidden_size"] == 32
    settings = shown(capsys, "--config", path, "--model.llama.hidden_size", "64", "--trainer.strategy.tp", "2")
    assert settings["model"]["init_args"]["llama"] | LLAMA == settings["model"]["init_args"]["llama"] | {"hidden_size": 32}
    assert settings["model"]["init_args"]["llama"]["hidden_size"] == 64
    assert settings["trainer"]["strategy"]["class_path"] == "lightning_3d.ThreeDStrategy"
    assert settings["trainer"]["strategy"]["init_args"]["tp"] == 2
    assert settings["trainer"]["strategy"]["init_args"]["sequence_parallel"] is True
    assert settings["trainer"]["callbacks"][0]["class_path"] == "lightning_3d.GradNorm"


def shown(capsys: Any, *args: str) -> dict[str, Any]:
    """What --print_config shows."""
    with pytest.raises(SystemExit):
        main(["fit", *args, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_blends_stages_and_masks_in_yaml(write, capsys) -> None:
    """The keys of configs/data/blend_stages.yaml, with folders that exist; a wrong one is named with its place."""
    content, folders = (
        recipe(callbacks=[{"class_path": "Throughput"}, {"class_path": "Summary"}], max_steps=3),
        [
            str(DATA / "nanoset_datatrove"),
            str(DATA / "nanoset_datatrove_u32"),
        ],
    )
    fragment = yaml.safe_load((ROOT / "configs/data/blend_stages.yaml").read_text())
    fragment["data_stages"][0] |= {"start_training_step": 3, "dataset_folder": folders, "sequence_length": 64}
    fragment |= {"dataset_folder": folders, "sequence_length": 32, "micro_batch_size": 2, "num_workers": 0}
    content["data"] = fragment | {"validation_folder": folders[0], "validation_samples": 4}
    assert main(["fit", "--config", write(content)]) == 0
    assert "steps        3" in capsys.readouterr().out
    content["data"]["data_stages"][0]["max_epochs"] = [None, 0.001]
    assert main(["fit", "--config", write(content)]) == 2
    assert "data.data_stages[0].max_epochs=0.001: this run would read" in capsys.readouterr().err


def test_synthetic_data_needs_no_file(write, capsys) -> None:
    content = recipe()
    content["data"] = yaml.safe_load((ROOT / "configs/data/synthetic.yaml").read_text())
    content["data"]["init_args"] |= {"vocab_size": 512, "sequence_length": 32}
    assert main(["fit", "--config", write(content)]) == 0
    assert "steps        2" in capsys.readouterr().out


def test_any_module_and_strategy_can_be_named(write, capsys) -> None:
    content = recipe(strategy={"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": {"device": "cpu"}})
    content["model"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    content["data"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"}
    assert main(["fit", "--config", write(content)]) == 0


def test_the_plan_is_shown_and_nothing_starts(write, capsys) -> None:
    content = recipe(strategy={"tp": 2, "pp": 2}, devices=4)
    content["data"]["batch_accumulation_per_replica"] = 2
    path = write(content)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", path, "--print_plan"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "stage 1 of 2" in out
    assert "lm_loss" not in out
    assert next(line.split() for line in out.splitlines() if "down_proj" in line)[1:7] == [
        "1",
        "(32,",
        "64)",
        "Replicate",
        "Shard(1)",
        "leave",
    ]


def change(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *path, last = key.split(".")
    place = content
    for name in path:
        place = place[name]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("trainer.max_stps", 3, ["trainer.max_stps"]),
        ("trainr", {"max_steps": 3}, ["trainr"]),
        ("model.llama.hiden_size", 3, ["llama", "hiden_size"]),
        ("model.optim.learning_rat", 3, ["optim", "learning_rat"]),
        ("data.sequence_lenth", 3, ["data", "sequence_lenth"]),
        ("trainer.strategy", {"tpp": 2}, ["trainer.strategy", "tpp"]),
        ("trainer.callbacks", [{"class_path": "GradNrm"}], ["trainer.callbacks", "GradNrm", "full path"]),
        ("trainer.callbacks", [{"class_path": "Throughput", "init_args": {"attn": "full"}}], ["trainer.callbacks", "attn"]),
        ("model.llama.hidden_size", "wide", ["model", "llama", "hidden_size", "int", "wide"]),
        ("model.llama.num_key_value_heads", 3, ["num_attention_heads: 4", "num_key_value_heads: 3"]),
        ("model.optim.lr_decay_style", "cosin", ["lr_decay_style", "cosine", "cosin"]),
        ("data.dataset_folder", "nowhere", ["data.dataset_folder", "nowhere", "prepare"]),
        ("trainer.strategy", {"tp": 2}, ["tp=2", "1 processes", "devices"]),
        ("trainer.strategy", {"data_parallel": "zero9"}, ["data_parallel", "zero2", "zero9"]),
        ("trainer.strategy", {"recompute": "most"}, ["recompute", "selective", "most"]),
        ("trainer.strategy", {"recompute": 0}, ["recompute=0", "selective", "every n-th block"]),
        ("trainer.accelerator", "cuda", ["CUDAAccelerator", "cpu"]),
        ("model", "nowhere.yaml", ["model", "nowhere.yaml"]),
    ],
)
def test_a_users_error_is_one_line_that_names_it(write, capsys, key, value, parts) -> None:
    assert main(["fit", "--config", write(change(recipe(), key, value))]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set")]
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert [part for part in parts if part not in err[0]] == []
    assert len(err[0]) < 300


def test_16_mixed_is_refused(write, capsys) -> None:
    assert main(["fit", "--config", write(recipe(strategy={"dp": 1}, precision="16-mixed"))]) == 2
    assert "16-mixed" in capsys.readouterr().err


@pytest.mark.slow  # test_launchers.py compares the two launchers, too
def test_losses_are_the_same_alone_in_two_stages_and_under_torchrun(write) -> None:
    """One process, two under Lightning's launcher, two under torchrun: the same samples, weights and steps."""
    content = recipe(strategy={"pp": 2}, devices=2)
    content["data"]["batch_accumulation_per_replica"] = 2
    path = write(content)
    launchers = [
        (["-m", "lightning_3d"], ["--trainer.devices", "1", "--trainer.strategy.pp", "1"]),
        (["-m", "lightning_3d"], []),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29631", "-m", "lightning_3d"], []),
    ]
    losses = [losses_of([*launcher, "fit", "--config", path, *options]) for launcher, options in launchers]
    assert losses[0][0] > 5
    assert losses[1] == losses[2] == pytest.approx(losses[0], abs=2e-4)


def losses_of(command: list[str]) -> list[float]:
    """First and last lm_loss, from the summary at the end."""
    out = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=True).stdout
    line = next(line for line in out.splitlines() if line.strip().startswith("lm_loss"))
    return [float(line.split()[1]), float(line.split()[3])]


def test_a_run_goes_on_from_its_last_checkpoint(write, capsys) -> None:
    saver = {"class_path": "lightning_3d.Checkpoint", "init_args": {"checkpoints_path": "saved", "checkpoint_interval": 1}}
    path = write(recipe(callbacks=["Summary", "lightning_3d.ProgressBar", saver], enable_checkpointing=True))
    steps = ["--trainer.max_steps", "3"]
    assert main(["fit", "--config", path, "--ckpt_path", "last"]) == 2
    assert "no whole checkpoint in saved" in capsys.readouterr().err
    assert main(["fit", "--config", path]) == 0
    assert main(["fit", "--config", path, *steps]) == 2, "would overwrite the run"
    capsys.readouterr()
    for checkpoint in ("last", "saved/step-2"):
        Path("saved/step-3").unlink(missing_ok=True)
        assert main(["fit", "--config", path, *steps, "--ckpt_path", checkpoint]) == 0
        out = capsys.readouterr().out
        assert "2 of 3 steps done" in out
        assert [line.split(" | ")[0] for line in out.splitlines() if "lm_loss" in line and line.startswith("step")] == ["step 3/3"] * 2
    assert main(["fit", "--config", path, *steps, "--ckpt_path", "last"]) == 0, "a finished run has nothing left to do"
    out = capsys.readouterr().out
    assert "3, all of them done before" in out
    assert "step 3/3 | lm_loss" not in out
    assert "saved/step-3" in out
    assert main(["validate", "--config", path, "--ckpt_path", "last"]) == 0


def test_functions_take_options_positionals_and_files(write, tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("In the beginning was the word. " * 40)
    (tmp_path / "b.txt").write_text("And the light shineth in darkness. " * 40)
    options = {"tokenizer": str(DATA / "tokenizer_bpe512"), "output": "set", "num_workers": 1, "progress": False}
    assert main(["prepare", "a.txt", "b.txt", "--config", write(options), "--append_eos", "false"]) == 0
    summary = yaml.safe_load(capsys.readouterr().out)
    assert summary["train"]["documents"] == 2
    assert main(["prepare", "c.txt", "--config", write(options)]) == 2
    assert "c.txt" in capsys.readouterr().err
    assert main(["prepare", "a.txt", "--outptu", "x", "--config", write(options)]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --outptu x\n"


def test_one_line_keeps_the_reason_and_drops_the_frame() -> None:
    message = """Parser key "model":
      Does not validate against any of the Union subtypes
      Subtypes: [<class 'A'>, <class 'NoneType'>]
      Errors:
        - Problem with given class_path 'A':
            Option 'hiden_size' is not accepted
        - Expected a <class 'NoneType'>
      Given value type: <class 'dict'>"""
    assert one_line(message) == "model: Option 'hiden_size' is not accepted"
    assert one_line("Expected a <class 'str'>") == "Expected a <class 'str'>"


def test_data_modules_are_found_by_their_last_name_in_a_new_process() -> None:
    """Where nothing else has imported them, as an earlier test would have."""
    code = """
import sys
from lightning_3d.__main__ import main
for name in ("synthetic", "text"):
    try:
        status = main(["fit", "--config", "recipes/tiny_llama.yaml", "--data", f"configs/data/{name}.yaml", "--print_config"])
    except SystemExit:
        status = 0
    assert status == 0
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "class_path: lightning_3d.SyntheticDataModule" in run.stdout
    assert "class_path: lightning_3d.TextDataModule" in run.stdout
