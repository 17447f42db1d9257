"""A file for each rank, ``ranks/rank-003.log`` under ``default_root_dir``: its log records, warnings, stacks and tracebacks."""

import faulthandler
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

FOLDER = "ranks"
DIGITS = 3


class RankLog(logging.Handler):
    """Made when there is something to write, and written to by appending: what a run writes after a restart follows.

    Args:
        root: the Trainer's ``default_root_dir``; an object store's takes no files that grow, so there is no log then.
        rank: its number.
    """

    def __init__(self, root: str, rank: int) -> None:
        super().__init__()
        self.path = None if "://" in root else Path(root).absolute() / FOLDER / f"rank-{rank:0{DIGITS}}.log"
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._show: Any = None
        self._took: Any = None
        self._added: list[logging.Handler] = [self]

    def attach(self) -> None:
        """From now on, take what is logged, and the warnings, which are shown as before too."""
        root = logging.getLogger()
        if not root.handlers and logging.lastResort is not None:  # which shows warnings only as long as there is no handler
            self._added.append(logging.lastResort)
        for handler in self._added:
            root.addHandler(handler)
        self._show = warnings.showwarning
        self._took = self._take  # each look-up of a method makes another object
        warnings.showwarning = self._took

    def detach(self) -> None:
        """Leave things as they were found."""
        for handler in self._added:
            logging.getLogger().removeHandler(handler)
        if warnings.showwarning is self._took:
            warnings.showwarning = self._show

    def _take(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        self._show(message, category, filename, lineno, *rest)
        self.write(warnings.formatwarning(message, category, filename, lineno))

    def emit(self, record: logging.LogRecord) -> None:
        """Called by ``logging``."""
        self.write(self.format(record))

    def write(self, text: str) -> None:
        """Append, with the time."""
        self._append(lambda file: file.write(text if text[:4].isdigit() else f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"))

    def write_stacks(self) -> None:
        """Append the stacks of all threads of this process."""
        self.write("stacks of all threads:")
        self._append(lambda file: faulthandler.dump_traceback(file, all_threads=True))

    def _append(self, write: Callable[[IO[str]], Any]) -> None:
        if self.path is not None:
            with suppress(OSError):  # a full disk must not end a run for the sake of its log
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    write(file)
