"""All ranks end together: when one is told to stop, and when one fails.

A signal handler must not communicate, and a rank that acts on its own leaves the others waiting in a collective. So SIGTERM only sets a
flag; the ranks agree at the start of the next batch and stop at the same step, where a checkpoint callback can save on all of them.
When a rank fails alone, nobody may wait for it: a save in progress of the exception first finds out whether all ranks came.
"""

import datetime
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

log = logging.getLogger(__name__)

EXIT_CODE_SIGTERM = 143  # 128 + 15, as a shell reports it
ARRIVAL_TIMEOUT_S = 10
GRACE_S = 5


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

    def end_children(self) -> None:
        """Give the processes that this one started a few seconds to end, then kill them."""
        deadline = time.monotonic() + GRACE_S
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


class EndTogether:
    """What one rank must do so that all end together."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._asked = False
        self._previous: Any = None
        self._group: dist.ProcessGroup | None = None
        self.is_lost = False  # a rank is gone: nothing may wait for it any more

    def connect(self) -> None:
        """Make the group for agreements that must not mix with training's; collective."""
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def watch_signals(self) -> None:
        """Take SIGTERM over from Lightning, whose handler communicates."""
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._ask)

    def forget_signals(self) -> None:
        """Give SIGTERM back."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _ask(self, signum: int, frame: Any) -> None:
        self._asked = True

    def stop_if_asked(self) -> None:
        """Raise on all ranks if any was asked to stop; collective.

        Raises:
            SIGTERMException: ends the process with code 143, after callbacks had their ``on_exception``.
        """
        if self._strategy.reduce_boolean_decision(self._asked, all=False):
            raise SIGTERMException(EXIT_CODE_SIGTERM)

    def all_arrived(self) -> bool:
        """Before a save: True unless an exception ended the run on some ranks only.

        Shapes: none.
        Placement: none.
        Communication: barrier, world, 10 s at most; only after an exception.
        Source: this project.
        """
        module = self._strategy.lightning_module
        if module is None or module.trainer.state.status != TrainerStatus.INTERRUPTED or self._group is None:
            return True
        try:
            dist.monitored_barrier(self._group, datetime.timedelta(seconds=ARRIVAL_TIMEOUT_S))
        except RuntimeError as error:
            self.is_lost = True
            log.warning("No checkpoint was saved: a rank failed alone, so its part of the state cannot be written (%s)", error)
        return not self.is_lost
