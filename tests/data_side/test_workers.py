"""Workers read on when a scheduler sends SIGTERM to every process, and end when their rank does."""

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

from lightning_3d.data.workers import TWICE_S, outlive_sigterm


def read_ahead() -> tuple[Iterator[int], multiprocessing.process.BaseProcess]:
    """0 to 49, and the worker that reads them."""
    others = multiprocessing.active_children()  # a RankPool's
    loader = DataLoader(range(50), batch_size=None, num_workers=1, prefetch_factor=2, worker_init_fn=outlive_sigterm)
    iterator = iter(loader)
    assert next(iterator) == 0
    (worker,) = (process for process in multiprocessing.active_children() if process not in others)
    return iterator, worker


@pytest.mark.timeout(60)
def test_a_worker_that_is_told_to_end_reads_on() -> None:
    """It has read only two ahead by then; SLURM may tell it twice."""
    iterator, worker = read_ahead()
    for _ in range(2):
        os.kill(worker.pid or 0, signal.SIGTERM)
        time.sleep(0.2)  # or the two would be one
    assert list(iterator) == list(range(1, 50))


def test_a_worker_does_not_look_through_what_its_rank_has_made() -> None:
    """Garbage collection would copy it all, page by page."""

    class Frozen:
        def __getitem__(self, index: int) -> tuple[bool, int, int]:
            return gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())

        def __len__(self) -> int:
            return 1

    here = len(gc.get_objects())
    gc.disable()
    try:
        ((enabled, frozen, others),) = DataLoader(Frozen(), batch_size=None, num_workers=1, worker_init_fn=outlive_sigterm)
    finally:
        gc.enable()
    assert enabled
    assert frozen > 0.9 * here
    assert others < 0.1 * here


@pytest.mark.timeout(60)
def test_told_again_it_ends() -> None:
    iterator, worker = read_ahead()
    os.kill(worker.pid or 0, signal.SIGTERM)
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]  # it had been asked for two before; so it was told before it read the third
    time.sleep(TWICE_S + 0.5)
    assert worker.is_alive()
    with contextlib.suppress(RuntimeError):  # torch's own handler of dead workers, where no Trainer has taken it away
        os.kill(worker.pid or 0, signal.SIGTERM)
        worker.join(30)
    assert worker.exitcode == -signal.SIGTERM
