"""All ranks end together: when one is told to stop, and when one fails.

A signal handler must not communicate, and a rank that acts on its own leaves the others waiting in a collective. So SIGTERM, and SIGUSR1
which SLURM can send ahead of it (`--signal=USR1@120`), only set a flag; the ranks agree before the next optimizer step and stop at the
same one, where a checkpoint callback can save on all of them. Every process then ends with code 143, also those that were not told. In
evaluation there is nothing to save: the rank that is told ends at once.

When a rank fails alone, nobody may wait for it: a save that follows an exception first finds out whether all ranks came. Its process ends,
the others see their connections to it close, and whoever started them ends what is left: torchrun, or rank 0 under Lightning's launcher.
What a person is told of it is in faults/.
"""

import atexit
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_3d.data.workers import outlive_sigterm

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE_SIGTERM = 143  # 128 + 15, as a shell reports it; for SIGUSR1 too
ARRIVAL_TIMEOUT_S = 5
STOP_TIMEOUT_S = 30  # for the other processes to finish their loggers after an agreed stop
FAILURE_TIMEOUT_S = 1  # for the other processes to end by themselves after a failure


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which checks the module before any process starts; under torchrun and SLURM it only checks."""

    def __init__(self, check: Callable[[Any, Any], None], environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        if trainer is not None:
            datamodules = (arg for arg in args if isinstance(arg, pl.LightningDataModule))
            self._check(trainer.lightning_module, next(datamodules, None))
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        if not self.procs:  # fit, then test: the processes are there
            super()._call_children_scripts()

    def end_children(self, timeout_s: float = FAILURE_TIMEOUT_S) -> None:
        """Give the processes that this one started some seconds, then kill them."""
        _end(list(self.procs), timeout_s)

    def end_children_at_exit(self, timeout_s: float, *, expected: bool) -> None:
        """When this process ends, after it has shown its error, give those that it started some seconds, then kill them.

        If they are ``expected`` to end with a code other than 0, Lightning's observer must not kill this process when one does.
        """
        atexit.register(_end, list(self.procs), timeout_s)
        if expected:
            self.procs.clear()  # the list that the observer watches


def _end(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        process.kill()


def init_worker(worker: int, rank: int) -> None:
    """In a worker of a DataLoader: random numbers of its own, the same for the ranks that read the same data; no end before its rank's."""
    pl_worker_init_function(worker, rank)
    outlive_sigterm(worker)


class EndTogether:
    """What one rank must do so that all end together."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy
        self._asked = False
        self._agreed = False
        self.store: dist.TCPStore | None = None
        self._agreements = 0
        self.is_lost = False  # a rank is gone: nothing may wait for it any more

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    def connect(self) -> None:
        """Make a store where ranks sign in: unlike a barrier it has a time limit, and does not mix with training; collective."""
        if self.store is not None or self._strategy.world_size == 1:
            return
        assert self._strategy.cluster_environment is not None
        host, first = self._strategy.cluster_environment.main_address, self._strategy.global_rank == 0
        mine = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if first else None
        port = self._strategy.broadcast(mine.port if mine else 0)
        self.store = mine or dist.TCPStore(host, port)

    def watch_signals(self) -> None:
        """Take the signals over from Lightning, whose handlers communicate; Lightning restores what was before, at the end of the run."""
        if threading.current_thread() is threading.main_thread():
            for each in STOP_SIGNALS:
                signal.signal(each, self._ask)

    def _ask(self, signum: int, frame: Any) -> None:
        if self._trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException(EXIT_CODE_SIGTERM)
        self._asked = True

    def stop_if_asked(self) -> None:
        """Between two optimizer steps: raise on all ranks if any was asked to stop; collective.

        Raises:
            SIGTERMException: ends the process with code 143, after callbacks had their ``on_exception``.
        """
        if not self._strategy.reduce_boolean_decision(self._asked, all=False):
            return
        self._asked, self._agreed = False, True
        # The batch at hand was counted as ready and will not be trained on: a checkpoint would go on after it.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.total.ready -= 1
        progress.current.ready -= 1
        progress.is_last_batch = False
        log.info("Stopping at step %d, as asked by a signal", self._trainer.global_step)
        raise SIGTERMException(EXIT_CODE_SIGTERM)

    def all_arrived(self) -> bool:
        """Before a save: True unless an exception ended the run on some ranks only; waits for 5 s at most, and only after an exception."""
        if self._agreed or self.store is None or self.is_lost or self._trainer.state.status != TrainerStatus.INTERRUPTED:
            return not self.is_lost
        self._agreements += 1
        try:
            self.is_lost = not self._all_sign_in(self.store, f"agreement_{self._agreements}")
        except RuntimeError:  # the store is gone with the rank that kept it
            self.is_lost = True
        if self.is_lost:
            log.warning("No checkpoint was saved: a rank failed alone, so its part of the state is not sound")
        return not self.is_lost

    def _all_sign_in(self, store: dist.TCPStore, name: str) -> bool:
        """The same answer on all ranks that ask: who comes after the first has given up comes too late."""
        if store.add(f"{name}_count", 1) == self._strategy.world_size:
            return store.compare_set(name, "", "all") == b"all"
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not store.check([name]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return store.compare_set(name, "", "lost") == b"all"

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception ended the run."""
        module = self._strategy.lightning_module
        is_attached = module is not None and module._trainer is not None  # not where the run was refused before it began
        return is_attached and self._trainer.state.status == TrainerStatus.INTERRUPTED

    def after(self, launcher: RankLauncher) -> None:
        """At the end of a run: see to the processes that this one started, if it was interrupted."""
        if self.was_interrupted:
            timeout_s = STOP_TIMEOUT_S if self._agreed else FAILURE_TIMEOUT_S
            launcher.end_children_at_exit(timeout_s, expected=self._agreed)
