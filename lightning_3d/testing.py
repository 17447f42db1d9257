"""Run a function on N ranks, on one machine, over gloo: for our tests and for yours.

    with RankPool() as pool:
        losses = pool.run(train_two_steps, world_size=4, args=(recipe,))

Importing torch and Lightning takes seconds, so the processes stay alive between calls; each call gets a fresh process
group of its own size (a tenth of a second). A call that fails or outlives its time ends all processes; the next starts anew.
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
from pathlib import Path
from types import TracebackType
from typing import Any

GLOO_TIMEOUT_S = 60


class RankPool:
    """Worker processes, started when first needed and reused.

    Args:
        threads: OMP threads of each process; by default one, since 8 processes on 2 cores gain nothing from more.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._workers: list[tuple[Any, Connection]] = []
        self._stacks = Path(tempfile.mkdtemp(prefix="rank_pool_"))

    def run(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...] = (), timeout_s: float = 120) -> list[Any]:
        """Call ``function(*args)`` on every rank (it must be importable, i.e. not a lambda) and return the results by rank.

        Raises:
            RuntimeError: with the traceback of the first rank that failed.
            TimeoutError: after ``timeout_s`` seconds, with the stacks of the ranks that were still running.
        """
        self._grow(world_size)
        port = _free_port()
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            connection.send((function, args, rank, world_size, port))
        return self._collect(world_size, time.monotonic() + timeout_s)

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", str(self._threads))
        for index in range(len(self._workers), size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, str(self._stacks / f"{index}.txt")), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._give_up(sorted(pending.values())))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    failed, results[rank] = connection.recv()
                except EOFError:
                    failed, results[rank] = True, f"the process of rank {rank} ended\n"
                if failed:
                    self.close()
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{results[rank]}")
        return [results[rank] for rank in range(world_size)]

    def _give_up(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR2)
        time.sleep(1)
        stacks = "\n".join(f"--- rank {rank}\n" + (self._stacks / f"{rank}.txt").read_text() for rank in ranks)
        self.close()
        return f"ranks {ranks} did not finish in time\n{stacks}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(connection: Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        while True:
            try:
                function, args, rank, world_size, port = connection.recv()
            except EOFError:
                return
            try:
                result = (False, _call(function, args, rank, world_size, port))
            except BaseException:
                result = (True, traceback.format_exc())
            sys.stdout.flush()
            connection.send(result)


def _call(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int) -> Any:
    import torch
    import torch.distributed as dist

    # The variables of torchrun, so that a Trainer made by the function finds the processes as it would there.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "rank_pool",
        "GROUP_RANK": "0",
    }
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GLOO_TIMEOUT_S))
    dtype = torch.get_default_dtype()
    try:
        return function(*args)
    finally:
        torch.set_default_dtype(dtype)
        dist.destroy_process_group()
