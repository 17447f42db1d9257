"""One error for the person: the first, with its place; what it did to the other ranks stays in their logs."""

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.faults.place import Place, chain, is_library, place_of_error
from lightning_3d.faults.rank_log import RankLog

_CONSEQUENCES = ("Timed out", "Connection closed by peer", "Connection reset by peer", "NCCL")
MESSAGE_LINES = 4


class FirstError:
    """What an exception that ends this rank shows, in place of the traceback that Python prints.

    Args:
        store: where ranks sign their failure; the first one is shown.
        name: of this rank, with its coords.
        module: whose layers the place is named by.
        rank_log: takes the traceback, on every rank.
        end_others: ends the processes that this one started, so that nothing is written after the error.
    """

    def __init__(self, store: dist.Store, name: str, module: nn.Module, rank_log: RankLog, end_others: Callable[[], None]) -> None:
        self._store, self._name, self._module, self._log, self._end_others = store, name, module, rank_log, end_others

    def install(self) -> None:
        """Take the place of the hook that is there, which is torch.distributed's: a traceback from each rank."""
        sys.excepthook = self.show

    def show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """As ``sys.excepthook``."""
        if not isinstance(error, Exception):
            sys.__excepthook__(kind, error, trace)
            return
        self._log.write("".join(traceback.format_exception(kind, error, trace)))
        self._write(self._report(error))

    def give_up(self, place: Place, stood_s: float) -> None:
        """End this process at once: its main thread waits in a collective for ranks that do not come."""
        self._log.write(f"ended after {stood_s:.0f} s: {place}")
        self._write(f"error on {self._name}: {place}\n  it waited for {stood_s:.0f} s, longer than timeout_s: {self._hint}")
        self._end_others()
        os._exit(1)

    def _write(self, text: str) -> None:
        """At one go, so that other ranks' lines do not come between; once, by the rank that failed first."""
        try:
            is_first = self._store.add("failures", 1) == 1
        except (RuntimeError, dist.DistError):  # rank 0 keeps the store: it has shown its own error, unless it was killed
            text, is_first = f"{self._name} ended because rank 0 did, see the error there: {self._hint}", True
        if is_first:
            self._end_others()
            sys.stderr.write(f"\n{text}\n")
            sys.stderr.flush()

    @property
    def _hint(self) -> str:
        return f"the logs of the ranks are in {self._log.path.parent}" if self._log.path else "no log was kept"

    def _report(self, error: BaseException) -> str:
        if isinstance(error, ConfigError):
            return f"error: {error}"
        cause = chain(error)[0]
        place = place_of_error(error, self._module)
        lines = str(cause).splitlines() or [""]
        message = "\n    ".join([f"{type(cause).__name__}: {lines[0]}", *lines[1:MESSAGE_LINES], *["..."] * (len(lines) > MESSAGE_LINES)])
        summary = [f"error on {self._name}: {place.work or 'outside of the stages'}", f"  {message}", f"  at {place.line}"]
        if place.collective and any(words in str(cause) for words in _CONSEQUENCES):
            summary.append(f"  in {place.collective}: another rank did not come, or ended without an error (killed?)")
        own = [line for line in traceback.extract_tb(cause.__traceback__) if not is_library(line.filename)]
        text = "".join(["Traceback (without torch's and Lightning's lines):\n", *traceback.format_list(own)])
        return "\n".join([text, *summary, f"  {self._hint}"])
