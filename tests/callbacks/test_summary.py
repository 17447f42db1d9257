import sys

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_3d.callbacks import Summary


def shown(text: str) -> list[dict[str, str]]:
    """The blocks of aligned lines."""
    blocks = [block.strip("\n") for block in text.split("\n\n")]
    return [dict(line.split(None, 1) for line in block.splitlines()) for block in blocks if block.startswith("  ")]


def test_says_what_runs_and_what_came_of_it(fit, capsys, tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path / "checkpoints", filename="{step}")
    logger = CSVLogger(tmp_path, name="logs")
    fit(Summary(), saver, logger=logger, enable_checkpointing=True, max_steps=4, max_epochs=None)
    before, after = shown(capsys.readouterr().out)

    assert before["layout"] == "SingleDeviceStrategy on 1 cpu rank"
    assert before["parameters"] == "2"
    assert before["step"] == "0 of 4 steps done"
    assert before["checkpoints"] == str(tmp_path / "checkpoints")
    assert before["logs"] == after["logs"] == str(tmp_path / "logs" / "version_0")

    # |w|^2 / 2 with w times 0.9, 0.95, 0.9667 before the last step's loss, and 0.975 after it
    assert after["lm_loss"] == "2.5000 -> 1.7078 (-32%)"
    assert after["val_lm_loss"] == "2.5000 -> 1.6234 (-35%)"
    assert after["checkpoints"] == str(tmp_path / "checkpoints" / "step=4.ckpt")
    assert after["resume"] == f"trainer.fit(..., ckpt_path='{tmp_path}/checkpoints/step=4.ckpt')"


def test_asks_the_strategy_for_the_whole_models_size(fit, capsys) -> None:
    class Knows(SingleDeviceStrategy):
        def parameter_counts(self) -> tuple[int, int]:
            return 1234567, 2

    fit(Summary(), strategy=Knows(device=torch.device("cpu")))
    assert shown(capsys.readouterr().out)[0]["parameters"] == "1,234,567, 2 of them on this rank"


def test_stands_in_for_lightnings_summary(fit) -> None:
    trainer, _ = fit(Summary())
    assert [type(c) for c in trainer.callbacks if isinstance(c, ModelSummary)] == [Summary]


def test_shows_the_command_that_goes_on(fit, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "lightning_3d")
    monkeypatch.setattr(
        sys, "argv", ["x", "fit", "--config", "a b.yaml", "--ckpt_path", "old", "--trainer.max_steps", "4", "--seed_everything", "1"]
    )
    fit(Summary(), ModelCheckpoint(tmp_path), enable_checkpointing=True, max_steps=4, max_epochs=None)
    command = "python -m lightning_3d fit --config 'a b.yaml' --seed_everything 1 --ckpt_path last --trainer.max_steps 8"
    assert shown(capsys.readouterr().out)[1]["resume"] == command


def test_a_run_without_validation_shows_the_sanity_checks_value(fit, capsys) -> None:
    fit(Summary(), max_steps=2, max_epochs=None, num_sanity_val_steps=-1, val_check_interval=100, check_val_every_n_epoch=None)
    assert shown(capsys.readouterr().out)[1]["val_lm_loss"] == "2.5000 -> 2.5000 (+0%)"
