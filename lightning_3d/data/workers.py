"""Processes that read ahead: they must not end before the ranks that they read for, and a user's error in one is still one line.

A scheduler sends SIGTERM to every process of a job, and the ranks then stop together between two steps. torch ends a DataLoader's worker
at once, which is an error in its rank: no checkpoint then.
"""

import gc
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from lightning_3d.errors import ConfigError

GRACE_S = 60


def outlive_sigterm(worker: int) -> None:
    """In a worker: when told to end, go on for a minute, or until told again as by the end of its rank."""

    def wait(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(GRACE_S)

    signal.signal(signal.SIGTERM, wait)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the ranks' own affair
    gc.enable()  # their GarbageCollection has it off, and a fork takes that over


def short_errors(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield what a DataLoader does; of a user's error in its worker, which comes with a traceback as its text, keep the last line."""
    try:
        yield from loader
    except ConfigError as error:
        raise ConfigError(str(error).strip().splitlines()[-1].removeprefix(f"{ConfigError.__module__}.ConfigError: ")) from error
