"""Callbacks that watch a run, on ranks."""

import logging
import time
from typing import Any

import lightning.pytorch as pl
from ranks_fit import Case, fit


class Slow(pl.Callback):
    """Makes the first block of one rank's stage wait, in each forward."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == self.rank:
            (stage,) = module.stages.values()
            next(iter(stage.h.values())).register_forward_pre_hook(lambda *_: time.sleep(self.seconds))


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def fit_and_listen(case: Case) -> tuple[dict[str, float], list[str]]:
    """Metrics at the end, and what was logged."""
    listener = Listener()
    logging.getLogger("lightning_3d").addHandler(listener)
    try:
        return fit(case)["metrics"], listener.heard
    finally:
        logging.getLogger("lightning_3d").removeHandler(listener)
