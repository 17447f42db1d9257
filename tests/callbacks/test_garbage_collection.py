"""Garbage is collected after fixed steps only, and automatic collection comes back."""

import gc
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_3d import GarbageCollection
from lightning_3d.data.workers import outlive_sigterm
from lightning_3d.errors import ConfigError


class Watch(Callback):
    """The step at which each collection of the oldest generation ran, and whether automatic collection was on in training."""

    def __init__(self) -> None:
        self.collected: list[int] = []
        self.enabled: set[bool] = set()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer
        gc.callbacks.append(self._note)

    def on_train_batch_start(self, *args: Any) -> None:
        self.enabled.add(gc.isenabled())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collected.append(self.trainer.global_step)


def test_fixed_steps(fit: Any) -> None:
    watch = Watch()
    fit(GarbageCollection(2), watch, batches=12, accumulate_grad_batches=2)
    assert watch.collected == [2, 4, 6]
    assert watch.enabled == {False}
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


class Fails(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError


def test_after_an_exception(fit: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(GarbageCollection(), Fails())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_off_stays_off(fit: Any) -> None:
    gc.disable()
    try:
        fit(GarbageCollection())
        assert not gc.isenabled()
    finally:
        gc.enable()


class Enabled:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return gc.isenabled()


def test_workers_collect_by_themselves() -> None:
    gc.disable()
    try:
        (seen,) = DataLoader(Enabled(), num_workers=1, worker_init_fn=outlive_sigterm, multiprocessing_context="fork")  # type: ignore[arg-type]
        assert bool(seen)
    finally:
        gc.enable()


def test_interval() -> None:
    with pytest.raises(ConfigError, match=r"^gc_interval=0 must be at least 1 step"):
        GarbageCollection(0)
