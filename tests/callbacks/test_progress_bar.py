import re

import pytest

from lightning_3d.callbacks import GradNorm, ProgressBar, Throughput
from lightning_3d.callbacks.progress_bar import readable


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


def test_prints_a_line_per_refresh_without_a_terminal(fit, capsys) -> None:
    fit(GradNorm(), Throughput(), ProgressBar(), max_steps=4, max_epochs=None, log_every_n_steps=2, num_sanity_val_steps=0)
    shown = lines(capsys.readouterr().out)
    assert [line.split(" | ")[0] for line in shown] == ["step 2/4", "step 4/4", "step 4/4"]
    # GradNorm and Throughput come before the bar, so that it shows this step's numbers
    assert re.fullmatch(r"step 2/4 \| lm_loss 2.025 \| grad_norm 2.012 \| tokens_per_sec [\d.]+k? \| lr 0.05 \| 00:0\d<00:0\d", shown[0])
    assert "val_lm_loss" in shown[2]
    assert "lr" not in shown[2]


def test_counts_optimizer_steps_not_batches(fit, capsys) -> None:
    fit(ProgressBar(), batches=6, accumulate_grad_batches=2, limit_val_batches=0)
    assert [line.split(" | ")[0] for line in lines(capsys.readouterr().out)] == ["step 1/3", "step 2/3", "step 3/3"]


def test_draws_a_bar_in_a_terminal(fit, capsys) -> None:
    _, recorder = fit(ProgressBar(plain=False), GradNorm(), max_steps=3, max_epochs=None, limit_val_batches=0)
    text = capsys.readouterr().out
    assert len(recorder.steps) == 3
    assert not lines(text.replace("\r", ""))[1:]
    assert "step 3/3" in text
    assert "lm_loss=" in text
    assert "v_num" not in text


def test_can_be_switched_off(fit, capsys) -> None:
    fit(ProgressBar(refresh_rate=0))
    assert not lines(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.12345, "5.123"),
        (3e-4, "3.0e-04"),
        (12345.6, "12.3k"),
        (7.25e6, "7.2M"),
        (1.5e10, "15.0G"),
        (0.0, "0"),
        (2.0, "2"),
        ("x", "x"),
        (-2e4, "-20.0k"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert readable(value) == text


def test_what_is_not_finite_is_shown_as_such() -> None:
    assert readable(float("nan")) == "nan"
    assert readable(float("inf")) == "inf"
