"""Bad steps change nothing but the count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Checkpoint, SkipBadSteps
from lightning_3d.errors import ConfigError
from tests.callbacks.conftest import Line


class Bad(Line):
    """Adam, and a loss that is multiplied in some steps; remembers the weights before each step."""

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__()
        self.factors = factors
        self.weights: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.weights.append(self.w.detach().clone())
        return super().training_step(batch, batch_idx) * self.factors.get(self.trainer.global_step, 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_bad_step_is_not_taken(fit: Any, factor: float, clip: float | None) -> None:
    """Steps 2 and 3 are bad: the weights stay, and what follows is as if they had not been."""
    model, good = Bad({2: factor, 3: factor}), Bad({})
    skip = SkipBadSteps()
    _, recorder = fit(skip, model=model, batches=8, gradient_clip_val=clip)
    fit(model=good, batches=6, gradient_clip_val=clip)
    assert torch.equal(model.weights[2], model.weights[4])
    assert [w.tolist() for w in model.weights[4:]] == [w.tolist() for w in good.weights[2:]]
    assert [step["skipped_steps"] for step in recorder.steps] == [0, 0, 1, 2, 2, 2, 2, 2]


def test_too_many_in_a_row_end_the_run(fit: Any, tmp_path: Path) -> None:
    model = Bad({step: float("nan") for step in (1, 4, 5, 6)})
    message = rf"max_in_a_row=2: steps 5 to 7 were bad \(the loss is nan\); go on from {tmp_path}/c/step-4, with a lower learning rate"
    with pytest.raises(ConfigError, match=message):
        fit(SkipBadSteps(max_in_a_row=2), Checkpoint(str(tmp_path / "c"), 4), model=model, batches=9, enable_checkpointing=True)
    assert len(model.weights) == 7


def test_the_advice_after_a_resume(fit: Any, tmp_path: Path) -> None:
    """Nothing saved since: the checkpoint that this run began from."""
    settings: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 2}
    fit(Checkpoint(str(tmp_path / "c"), 4), model=Bad({}), enable_checkpointing=True)
    bad = {step: float("nan") for step in range(4, 8)}
    for folder in ("c", "d"):
        callbacks = SkipBadSteps(max_in_a_row=1), Checkpoint(str(tmp_path / folder), 9)
        with pytest.raises(ConfigError, match=rf"steps 5 to 6 were bad .*; go on from {tmp_path}/c/step-4, with"):
            fit(*callbacks, model=Bad(bad), ckpt_path=str(tmp_path / "c/step-4"), **settings)


def test_spikes(fit: Any) -> None:
    """The norm falls slowly, 2.2, 2.1, ...; ten times as much is skipped once there are norms to compare with."""
    model = Bad({0: 10.0, 6: 10.0, 8: 1.01})
    _, recorder = fit(SkipBadSteps(spike_stds=4, spike_window=8), model=model, batches=10)
    assert [step["skipped_steps"] for step in recorder.steps] == [0] * 10  # the first norm is far off, and hides the second
    model = Bad({6: 10.0, 8: 1.01})
    _, recorder = fit(SkipBadSteps(spike_stds=4, spike_window=8), model=model, batches=10)
    assert [step["skipped_steps"] for step in recorder.steps] == [0] * 6 + [1] * 4
    assert torch.equal(model.weights[6], model.weights[7])


def test_the_count_goes_on_after_a_resume(fit: Any, tmp_path: Path) -> None:
    fit(SkipBadSteps(), Checkpoint(str(tmp_path), 4), model=Bad({1: float("nan")}), batches=8, max_steps=4, enable_checkpointing=True)
    options: dict[str, Any] = {"batches": 8, "enable_checkpointing": True, "ckpt_path": tmp_path / "step-4"}
    _, recorder = fit(SkipBadSteps(), Checkpoint(str(tmp_path), 4), model=Bad({6: float("nan")}), **options)
    assert [step["skipped_steps"] for step in recorder.steps] == [1, 1, 2, 2]


class Accumulated(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert trainer.accumulate_grad_batches == 2


def test_any_batch_of_an_accumulation_counts(fit: Any) -> None:
    model = Bad({1: float("nan")})
    _, recorder = fit(SkipBadSteps(), Accumulated(), model=model, batches=6, accumulate_grad_batches=2)
    assert recorder.steps[-1]["skipped_steps"] == 1


def test_several_optimizers_are_refused(fit: Any) -> None:
    class Two(Bad):
        def __init__(self) -> None:
            super().__init__({})
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    with pytest.raises(ConfigError, match="SkipBadSteps is for one optimizer, and there are 2: leave it out"):
        fit(SkipBadSteps(), model=Two())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_in_a_row": -1}, "max_in_a_row=-1 must be at least 0"),
        ({"spike_window": 1}, "spike_window=1 must be at least 2"),
        ({"spike_stds": 0.0}, "spike_stds=0.0 must be above 0"),
    ],
)
def test_bad_settings(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkipBadSteps(**keys)
