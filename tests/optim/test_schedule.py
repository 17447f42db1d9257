"""The learning rates of whole runs against lists put together by hand, piece by piece."""

import logging
import math

import pytest
import torch

from lightning_3d.errors import ConfigError
from lightning_3d.optim.schedule import LearningRate, ScheduledLR

PEAK, LOW = 3e-4, 2e-5
SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "1-sqrt": lambda x: 1 - x**0.5,
    "constant": lambda x: 1.0,
}


def by_hand(style, warmup, plateau, decay, tail):
    """Warm-up, plateau, decay and tail, one after another: W + P + n + T rates."""
    climb = [PEAK * step / warmup for step in range(1, warmup + 1)]
    fall = [LOW + (PEAK - LOW) * SHAPES[style](step / decay) for step in range(1, decay + 1)]
    return climb + [PEAK] * plateau + fall + [PEAK if style == "constant" else LOW] * tail


def rates(schedule, optimizer=None):
    """What an optimizer sees at each of its steps."""
    optimizer = optimizer or torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=9.9)
    scheduler, seen = ScheduledLR(optimizer, schedule), []
    for _ in range(schedule.train_steps):
        assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"] == scheduler.get_last_lr()[0]
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("style", SHAPES)
@pytest.mark.parametrize(
    ("steps", "warmup", "start", "decay", "pieces"),
    [
        (15, 2, None, 13, (2, 0, 13, 0)),  # as in a Nanotron file: the decay fills the run
        (15, 2, None, None, (2, 0, 13, 0)),
        (20, 4, 10, None, (4, 6, 10, 0)),  # warm-up, stable, decay
        (20, 4, 10, 6, (4, 6, 6, 4)),
        (20, 0, 8, 12, (0, 8, 12, 0)),
        (5, 4, None, None, (4, 0, 1, 0)),
        (4, 4, None, None, (4, 0, 0, 0)),
    ],
)
def test_every_rate_of_a_run(style, steps, warmup, start, decay, pieces):
    schedule = LearningRate(
        steps, PEAK, lr_warmup_steps=warmup, lr_decay_style=style, lr_decay_steps=decay, lr_decay_starting_step=start, min_decay_lr=LOW
    )
    assert rates(schedule) == pytest.approx(by_hand(style, *pieces), rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("low", [0.0, LOW])
def test_starts_above_zero_and_ends_at_exactly_the_minimum(style, warmup, low):
    seen = rates(LearningRate(50, PEAK, lr_warmup_steps=warmup, lr_decay_style=style, min_decay_lr=low))
    assert seen[0] == (PEAK / warmup if warmup else PEAK)
    assert max(seen) == PEAK
    assert seen[-1] == low
    assert all(rate > low for rate in seen[warmup:-1])


def test_without_warm_up_the_first_step_is_the_peak_and_the_fall_even():
    seen = rates(LearningRate(5, 4.0, lr_decay_style="linear"))
    assert seen == pytest.approx([4.0, 3.0, 2.0, 1.0, 0.0])


def test_constant_warm_up_is_at_the_peak_from_the_first_step():
    seen = rates(LearningRate(6, 4.0, lr_warmup_steps=3, lr_warmup_style="constant", min_decay_lr=1.0))
    assert seen == [4.0, 4.0, 4.0, 3.0, 2.0, 1.0]


def test_one_step_runs_at_the_peak():
    assert rates(LearningRate(1, PEAK)) == [PEAK]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped():
    schedule = LearningRate(12, PEAK, lr_warmup_steps=3, lr_decay_style="cosine", min_decay_lr=LOW)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, straight, saved = ScheduledLR(optimizer, schedule), [], None
    for step in range(12):
        saved = scheduler.state_dict() if step == 5 else saved
        straight.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert saved == {"last_epoch": 5}
    fresh = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(3)], lr=1.0)  # another number of groups
    resumed, tail = ScheduledLR(fresh, schedule), []
    resumed.load_state_dict(saved)
    for _ in range(5, 12):
        assert [group["lr"] for group in fresh.param_groups] == resumed.get_last_lr()
        tail.append(fresh.param_groups[2]["lr"])
        fresh.step()
        resumed.step()
    assert tail == straight[5:]


def test_a_run_resumed_under_other_settings_follows_those():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    longer = LearningRate(100, 2 * PEAK)
    scheduler = ScheduledLR(optimizer, longer)
    scheduler.load_state_dict({"last_epoch": 5})
    assert optimizer.param_groups[0]["lr"] == longer.at(5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_steps": -1}, ["max_steps: -1", "trainer.max_steps"]),
        ({"learning_rate": 0.0}, ["learning_rate: 0.0"]),
        ({"min_decay_lr": 1.0}, ["min_decay_lr: 1.0", "learning_rate: 0.0003"]),
        ({"min_decay_lr": -1e-5}, ["min_decay_lr: -1e-05"]),
        ({"lr_warmup_steps": -1}, ["lr_warmup_steps: -1"]),
        ({"lr_decay_steps": 0}, ["lr_decay_steps: 0", "constant"]),
        ({"lr_warmup_steps": 5, "lr_decay_starting_step": 3}, ["lr_decay_starting_step: 3", "lr_warmup_steps: 5"]),
        ({"lr_warmup_style": "cosine"}, ["lr_warmup_style: cosine", "linear, constant"]),
        ({"lr_decay_style": "sqrt"}, ["lr_decay_style: sqrt", "1-sqrt"]),
    ],
)
def test_refuses_what_cannot_be(settings, words):
    with pytest.raises(ConfigError) as error:
        LearningRate(**{"train_steps": 10, "learning_rate": PEAK, **settings})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("settings", [{"lr_warmup_steps": 20}, {"lr_decay_steps": 30}, {"lr_decay_starting_step": 12}])
def test_a_run_cut_short_is_allowed_with_a_warning(settings, caplog):
    with caplog.at_level(logging.WARNING):
        schedule = LearningRate(10, PEAK, **settings)
    assert "does not reach min_decay_lr" in caplog.text
    assert all(rate > 0 for rate in rates(schedule))
