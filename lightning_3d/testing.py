"""Run a function on N ranks, on one machine, over gloo: for our tests and for yours.

    with RankPool() as pool:
        losses = pool.run(train_two_steps, world_size=4, args=(recipe,))

Importing torch and Lightning takes seconds, so one server imports them and the processes are its forks. They stay alive between calls, in
one group for each world size, with one default process group each: torch caches meshes by their shape, so a process must not leave its
group for another. A call that fails or outlives its time ends the processes of its group; the next call starts new ones.
"""

import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

GLOO_TIMEOUT_S = 60
MAX_PROCESSES = 8
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.pipelining", "lightning_3d.module", "lightning_3d.strategy"]
MAX_CALLS = 100  # each call leaves process groups behind, with two threads each


class RankPool:
    """Worker processes, started when first needed and reused.

    Args:
        max_processes: over all world sizes; groups that were not used for longest make room for a new one.
    """

    def __init__(self, max_processes: int = MAX_PROCESSES) -> None:
        self._max_processes = max_processes
        self._groups: dict[int, _Group] = {}  # by world size, the last used is last

    def run(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...] = (), timeout_s: float = 120) -> list[Any]:
        """Call ``function(*args)`` on every rank (it must be importable, i.e. not a lambda) and return the results by rank.

        Raises:
            RuntimeError: with the traceback of the first rank that failed.
            TimeoutError: after ``timeout_s`` seconds, with the stacks of the ranks that were still running.
        """
        group = self._groups.pop(world_size, None)
        if group is not None and group.calls >= MAX_CALLS:
            group.close()
            group = None
        if group is None:
            self._make_room(world_size)
            group = _Group(world_size)
        try:
            results = group.run(function, args, timeout_s)
        except BaseException:
            group.close()
            raise
        self._groups[world_size] = group
        return results

    def close(self) -> None:
        """End all processes."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make_room(self, world_size: int) -> None:
        while self._groups and sum(self._groups) + world_size > self._max_processes:
            self._groups.pop(next(iter(self._groups))).close()


class _Group:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self._workers: list[tuple[ForkServerProcess, Connection]] = []
        port = _free_port()
        # A process has one thread unless the caller says otherwise: 8 processes on few cores gain nothing from more.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # only what starts no thread and touches no device
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            environment = {**os.environ, **_like_torchrun(rank, world_size, port)}
            process = context.Process(target=_work, args=(theirs, environment, str(self._stacks(rank))), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        self.calls += 1
        deadline = time.monotonic() + timeout_s
        for _, connection in self._workers:
            connection.send((function, args))
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._who_waits_where(sorted(pending.values())))
            for one in ready:
                assert isinstance(one, Connection)
                rank = pending.pop(one)
                results[rank] = _receive(one, rank, len(self._workers))
        return [results[rank] for rank in range(len(self._workers))]

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.txt"

    def _who_waits_where(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid or 0, signal.SIGUSR2)
        time.sleep(1)
        stacks = "\n".join(f"--- rank {rank}\n" + self._stacks(rank).read_text() for rank in ranks if self._stacks(rank).exists())
        return f"ranks {ranks} did not finish in time\n{stacks}"


def _receive(connection: Connection, rank: int, world_size: int) -> Any:
    try:
        failed, result = connection.recv()
    except EOFError:
        failed, result = True, "its process ended"
    if failed:
        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{result}")
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _like_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Its variables, so that a Trainer made by the function finds the processes as it would there."""
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "rank_pool"}
    return {name: str(value) for name, value in variables.items()}


def _work(connection: Connection, environment: dict[str, str], stacks: str) -> None:
    """A rank, in an environment that is its own and not the server's."""
    file = open(stacks, "w")  # noqa: SIM115  (faulthandler keeps it)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    try:
        import torch
        import torch.distributed as dist

        os.environ.clear()
        os.environ |= environment
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GLOO_TIMEOUT_S))
        while True:
            function, args = connection.recv()
            torch.set_default_dtype(torch.float32)
            result = _call(function, args)
            sys.stdout.flush()
            connection.send(result)
    except EOFError:
        return


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return False, function(*args)
    except BaseException:
        return True, traceback.format_exc()
