"""Says which rank waits where, before the time of a collective is over, and ends a rank that would wait for ever.

Each rank has a thread that looks at the main thread now and then. When that has stood at one line for half of the time limit, the rank asks
all the others through a store, not through a collective, and the first to ask writes one report. A rank that gives no answer is gone, or
is in a call that does not let Python run.

NCCL ends a process whose collective takes too long. gloo raises in collectives, but its receives know only the limit that their group
was made with (torch 2.13), so a rank that is still in one after the limit ends here.
"""

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist

from lightning_3d.faults.place import Place

log = logging.getLogger("lightning_3d")

TICKS = 20  # looks in one time limit
LONGEST_TICK_S = 15.0
LISTED = 16  # lines of a report: with thousands of ranks, the places that fewest are at


class Watchdog(threading.Thread):
    """The thread of one rank.

    Args:
        store: for questions and answers; nobody else's.
        rank: its number.
        names: of all ranks, with their coords.
        place: where the main thread is.
        limit_s: after so many seconds in one collective a rank gives up; may be changed.
        on_stall: called when this rank is asked where it is.
        give_up: called when it has waited for too long; does not return.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        names: list[str],
        place: Callable[[], Place],
        limit_s: float,
        on_stall: Callable[[], None],
        give_up: Callable[[Place, float], None],
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._store, self._rank, self._names, self._place = store, rank, names, place
        self.limit_s, self._on_stall, self._give_up = limit_s, on_stall, give_up
        self._main = threading.main_thread().ident or 0
        self._stopped = threading.Event()
        self._beats = self._stalls = 0
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._since_s = time.monotonic()
        self._reported = self._lost = False

    @property
    def tick_s(self) -> float:
        """Seconds between two looks."""
        return min(self.limit_s / TICKS, LONGEST_TICK_S)

    def beat(self) -> None:
        """Another batch has begun."""
        self._beats += 1

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join(timeout=2 * LONGEST_TICK_S)

    def run(self) -> None:
        """Look and answer until stopped."""
        while not self._stopped.wait(self.tick_s):
            stood_s = self._look()
            try:
                if not self._lost:
                    self._ask_and_answer(stood_s)
            except (RuntimeError, dist.DistError):
                self._lost = True  # the store is gone, and with it rank 0: nobody will end this rank if it stands still
            if stood_s > self.limit_s + 2 * self.tick_s and not self._stopped.is_set():
                place = self._place()
                if self._lost or place.collective:
                    self._give_up(place, stood_s)

    def _look(self) -> float:
        """For how many seconds the main thread has stood where it is."""
        frame = sys._current_frames().get(self._main)
        seen = (self._beats, id(frame), frame.f_lasti if frame else 0)
        del frame
        if seen != self._seen:
            self._seen, self._since_s, self._reported = seen, time.monotonic(), False
        return time.monotonic() - self._since_s

    def _ask_and_answer(self, stood_s: float) -> None:
        if stood_s > self.limit_s / 2 and not self._reported:
            self._reported = True
            if self._store.add(self._key("asked"), 1) == 1:
                self._answer()
                self._report(stood_s)
                return
        if self._store.check([self._key("asked")]):
            self._answer()
            self._stalls += 1

    def _key(self, what: object) -> str:
        return f"stall_{self._stalls}_{what}"

    def _answer(self) -> None:
        self._store.set(self._key(self._rank), str(self._place()))
        self._on_stall()

    def _report(self, stood_s: float) -> None:
        """Gather the answers and write them down, ranks at the same place together, few ranks before many."""
        deadline = time.monotonic() + 3 * self.tick_s + 1
        keys = [self._key(rank) for rank in range(len(self._names))]
        while not self._store.check(keys) and time.monotonic() < deadline and not self._stopped.wait(self.tick_s / 4):
            pass
        ranks: defaultdict[str, list[str]] = defaultdict(list)
        for name, key in zip(self._names, keys, strict=True):
            ranks[self._store.get(key).decode() if self._store.check([key]) else "gives no answer"].append(name)
        self._stalls += 1
        places = sorted(ranks.items(), key=lambda item: len(item[1]))
        lines = [f"  {', '.join(who[:LISTED])}{' ...' if len(who) > LISTED else ''}: {place}" for place, who in places[:LISTED]]
        head = f"no progress for {stood_s:.0f} s; a rank gives up after {self.limit_s:.0f} s in one collective (timeout_s)"
        log.warning("\n".join([head, *lines]))
