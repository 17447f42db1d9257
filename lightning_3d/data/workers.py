"""Processes that read ahead: they must not end before the ranks that they read for, and a user's error in one is still one line.

A scheduler sends SIGTERM to every process of a job, and the ranks then stop together between two steps. torch ends a DataLoader's worker
at once, which is an error in its rank: no checkpoint then.
"""

import gc
import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from lightning_3d.errors import ConfigError

GRACE_S = 600  # a save may take minutes, and the death of a worker would be an error in it
TWICE_S = 3  # SLURM, when it pre-empts without a grace time, sends the same signal twice: to the step, and through srun
KILL_S = 30  # and kills then


def outlive_sigterm(worker: int) -> None:
    """In a worker: when told to end, go on for some minutes, or until told again as by the end of its rank."""
    first_s = 0.0

    def wait(signum: int, frame: FrameType | None) -> None:
        nonlocal first_s
        told_again, first_s = bool(first_s), first_s or time.monotonic()
        if told_again and time.monotonic() - first_s > TWICE_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        signal.alarm(KILL_S if told_again else GRACE_S)

    signal.signal(signal.SIGTERM, wait)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the ranks' own affair
    gc.freeze()  # what the rank has made is garbage for no one here; to look through it would copy its memory, and take a second
    gc.enable()  # the rank's GarbageCollection has it off, and a fork takes that over


def short_errors(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield what a DataLoader does; of a user's error in its worker, which comes with a traceback as its text, keep the last line."""
    try:
        yield from loader
    except ConfigError as error:
        raise ConfigError(str(error).strip().splitlines()[-1].removeprefix(f"{ConfigError.__module__}.ConfigError: ")) from error
