import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_3d.callbacks import GradNorm


def norms(weights: tuple[float, float], lr: float, steps: int) -> list[float]:
    """The gradient of 0.5 * |w|^2 is w; step k multiplies it by 1 - lr / (1 + k)."""
    start, factors = (weights[0] ** 2 + weights[1] ** 2) ** 0.5, [1.0]
    for step in range(steps - 1):
        factors.append(factors[-1] * (1 - lr / (1 + step)))
    return [start * factor for factor in factors]


def test_logs_the_norm_of_every_step(fit) -> None:
    _, recorder = fit(GradNorm())
    assert [step["grad_norm"] for step in recorder.steps] == pytest.approx(norms((1, 2), 0.1, 4), rel=1e-6)


def test_shows_the_norm_before_clipping(fit) -> None:
    _, recorder = fit(GradNorm(), gradient_clip_val=0.1)
    assert recorder.steps[0]["grad_norm"] == pytest.approx(5**0.5)


def test_sums_over_accumulated_batches(fit) -> None:
    """Half the loss twice: the same gradient, once for every two batches."""
    _, recorder = fit(GradNorm(), accumulate_grad_batches=2)
    assert "grad_norm" not in recorder.steps[0]
    assert [recorder.steps[i]["grad_norm"] for i in (1, 3)] == pytest.approx(norms((1, 2), 0.1, 2), rel=1e-6)


def test_computes_nothing_when_no_log_is_due(fit, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("lightning_3d.callbacks.grad_norm.total_norm", lambda *_: calls.append(1) or torch.ones(()))
    fit(GradNorm(), log_every_n_steps=2)
    assert len(calls) == 2


class Knows(SingleDeviceStrategy):
    """Has the norm ready where clipping by norm has computed it, and can compute it."""

    last_grad_norm = torch.tensor(42.0)

    def gradient_norm(self) -> torch.Tensor:
        return torch.tensor(7.0)


@pytest.mark.parametrize(
    ("clipping", "norm"),
    [({"gradient_clip_val": 1.0}, 42.0), ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 7.0), ({}, 7.0)],
    ids=["by norm", "by value", "none"],
)
def test_takes_the_strategys_norm_where_there_is_one(fit, clipping, norm) -> None:
    _, recorder = fit(GradNorm(), strategy=Knows(device=torch.device("cpu")), **clipping)
    assert [step["grad_norm"] for step in recorder.steps] == [norm] * 4
