"""Processes that read ahead must not end before the ranks that they read for.

A scheduler sends SIGTERM to every process of a job, and the ranks then stop together between two steps. torch ends a DataLoader's worker
at once, which is an error in its rank: no checkpoint then.
"""

import signal
from types import FrameType

GRACE_S = 60


def outlive_sigterm(worker: int) -> None:
    """In a worker: when told to end, go on for a minute, or until told again as by the end of its rank."""

    def wait(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(GRACE_S)

    signal.signal(signal.SIGTERM, wait)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the ranks' own affair
