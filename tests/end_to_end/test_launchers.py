"""One recipe under Lightning's own launcher and under torchrun: the same losses, and the same refusals."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end.conftest import LAUNCHERS, Starter

from lightning_3d.checkpoint import step_folder

DATA = str(Path(__file__).parent.parent / "data" / "nanoset_datatrove")
CLI = ["-m", "lightning_3d"]


def recipe(folder: Path, **trainer: Any) -> Path:
    """Two stages on two processes, validated every second step."""
    llama = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    data = {"dataset_folder": DATA, "validation_folder": DATA, "validation_samples": 3, "sequence_length": 16}
    checkpoint = {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": 2}
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"pp": 2},
        "max_steps": 4,
        "max_epochs": -1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder), "name": "logs"}},
        "callbacks": [{"class_path": "lightning_3d.Checkpoint", "init_args": checkpoint}],
    }
    content = {"model": {"llama": llama}, "data": data | {"batch_accumulation_per_replica": 2}, "trainer": options | trainer}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def metrics(folder: Path, name: str) -> list[float]:
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.timeout(500)
def test_the_launchers_train_alike(start: Starter) -> None:
    """Then the run is validated by the word last in the layout that trained it, and tested by its folder on one process."""
    losses, validation = {}, {}
    for launcher in LAUNCHERS:
        folder = start.folder / launcher
        folder.mkdir()
        run = start(*CLI, "fit", "--config", recipe(folder), launcher=launcher)
        assert run.wait() == 0, run.output
        losses[launcher], validation[launcher] = metrics(folder, "lm_loss"), metrics(folder, "val_lm_loss")
    assert losses["lightning"] == losses["torchrun"]
    assert validation["lightning"] == validation["torchrun"]
    assert (len(losses["torchrun"]), len(validation["torchrun"])) == (4, 2)
    folder = start.folder / "lightning"
    again = start(*CLI, "validate", "--config", recipe(folder, logger=False), "--ckpt_path", "last", launcher="torchrun")
    assert again.wait() == 0, again.output
    assert shown(again.output, "val_lm_loss") == pytest.approx(validation["lightning"][-1], abs=1e-6)
    one = ["--trainer.devices", "1", "--trainer.strategy.pp", "1", "--ckpt_path", step_folder(folder / "checkpoints", 4)]
    tested = start(*CLI, "test", "--config", recipe(folder, logger=False), *one)
    assert tested.wait() == 0, tested.output
    assert shown(tested.output, "test_lm_loss") == pytest.approx(validation["lightning"][-1], abs=1e-5)


def shown(output: str, name: str) -> float:
    """A number in the table that Lightning prints."""
    found = re.search(rf"{name}\W+([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launcher", "changes", "message"),
    [
        ("lightning", {"strategy": {"dp": 2, "pp": 2}}, "dp=2 x tp=1 x pp=2 = 4, but there are 2 processes"),
        pytest.param(
            "torchrun",
            {"strategy": {"dp": 2, "pp": 2}},
            "dp=2 x tp=1 x pp=2 = 4, but there are 2 processes",
            marks=pytest.mark.slow,  # the next refusal comes from both ranks of torchrun, too
        ),
        (
            "torchrun",
            {"devices": 3},
            "trainer.devices=3 x num_nodes=1, but 2 processes were started on each of 1 nodes: set trainer.devices=2",
        ),
    ],
    ids=["lightning-product", "torchrun-product", "torchrun-devices"],
)
def test_sizes_that_do_not_fit(launcher: str, changes: dict[str, Any], message: str, start: Starter) -> None:
    """One line from one process, before any other starts where none has been started yet."""
    run = start(*CLI, "fit", "--config", recipe(start.folder, **changes), launcher=launcher)
    assert run.wait() not in (0, None)
    errors = [line for line in run.output.splitlines() if line.startswith("error:")]  # a slow machine may let rank 1 say so, too
    assert len(errors) == 1, run.output
    assert message in errors[0]
    assert not re.search(r'File ".*lightning', run.output)  # no traceback of ours; torchrun always shows one of its own
    assert not (start.folder / "logs").exists()
