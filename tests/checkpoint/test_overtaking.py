"""Training does not overtake the copy of its state: whatever writes to it waits, or it was copied before."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_overtaking import STEPS, be_late, differences
from torch import Tensor

from lightning_3d.checkpoint import Saver, restore
from lightning_3d.errors import CheckpointWriteError
from lightning_3d.testing import RankPool


@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_a_trainer(manual: bool, accumulate: int, pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(differences, 1, (str(tmp_path), manual, accumulate))
    assert len(found) == STEPS
    assert list(found.values()) == [[]] * STEPS


class Wrapper(torch.optim.Optimizer):
    """Lets another optimizer do the work, as Lookahead does; hooks of its own are not called."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def model() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    backward(module)
    optimizer.step()
    return module, [optimizer]


def backward(module: torch.nn.Module) -> Tensor:
    module.zero_grad()
    loss: Tensor = module(torch.ones(1, 3)).square().sum()
    loss.backward()
    return loss


STEPPED: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], Any]] = {
    "closure": lambda module, optimizer: optimizer.step(closure=lambda: backward(module)),
    "closure by position": lambda module, optimizer: optimizer.step(lambda: backward(module)),
    "no closure": lambda module, optimizer: (backward(module), optimizer.step()),
    "inside another": lambda module, optimizer: Wrapper(optimizer).step(lambda: backward(module)),
}


@pytest.mark.parametrize("way", STEPPED)
def test_a_step(way: str, tmp_path: Path) -> None:
    module, (optimizer,) = model()
    before = [value.clone() for value in optimizer.state[module.weight].values()]
    saver = Saver(in_background=True)
    saver.connect()
    be_late(saver)
    saver.save(str(tmp_path / "step-1"), module, [optimizer], {"global_step": 1})
    STEPPED[way](module, optimizer)
    saver.wait()
    after = list(optimizer.state[module.weight].values())
    assert not any(map(torch.equal, before, after))
    restore(str(tmp_path / "step-1"), module, [optimizer])
    assert all(map(torch.equal, before, optimizer.state[module.weight].values()))


def test_the_copy_goes_on_beside_a_closure(tmp_path: Path) -> None:
    """Until it ends; and later closures have nothing to wait for."""
    module, (optimizer,) = model()
    saver, seen = Saver(in_background=True), []
    saver.connect()

    def closure() -> Tensor:
        seen.append(saver._copies._done.done())
        return backward(module)

    be_late(saver)
    saver.save(str(tmp_path / "step-1"), module, [optimizer], {"global_step": 1})
    for _ in range(2):
        optimizer.step(closure=closure)
    saver.wait()
    assert seen == [False, True]


@pytest.mark.parametrize("waits", [False, True])
def test_who_writes_to_moments_by_hand_must_wait(waits: bool, tmp_path: Path) -> None:
    """The save of a state that there never was fails."""
    module, (optimizer,) = model()
    saver = Saver(in_background=True)
    saver.connect()
    be_late(saver)
    saver.save(str(tmp_path / "step-1"), module, [optimizer], {"global_step": 1})
    if waits:
        saver.wait_for_copy()
    optimizer.state[module.weight]["exp_avg"].zero_()
    message = r"exp_avg was written to while it was copied: call wait_for_copy\(\)"
    with nullcontext() if waits else pytest.raises(CheckpointWriteError, match=message):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"] * waits
