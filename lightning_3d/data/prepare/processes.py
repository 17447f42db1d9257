"""A function over many tasks, in processes that are told one task at a time and report while they work.

A pipe to each process is all that they share. It ends with the process at its other end, however that one ends: a worker whose parent was
killed stops at its next report, and the parent learns at once of a worker that was killed. concurrent.futures leaves orphans
that wait for ever, or finish what they were told.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from lightning_3d.errors import ConfigError

Task = TypeVar("Task")
Report = TypeVar("Report")
Work = Callable[[Task], Iterator[Report]]


def in_processes(work: "Work[Task, Report]", tasks: Iterable[Task], num_workers: int) -> Iterator[Report]:
    """Yield what `work` reports of its tasks, in the order in which it comes; with one worker, the work is done here.

    Raises:
        ConfigError: as `work` does, or a process was killed. The others are then killed, too.
    """
    if num_workers == 1:
        for task in tasks:
            yield from work(task)
        return
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(num_workers):
            pipe, process = _start(work, max(1, (os.cpu_count() or 1) // num_workers))
            workers[pipe] = process
        yield from _reports(workers, iter(tasks))
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def _reports(workers: dict[Connection, BaseProcess], tasks: Iterator[Any]) -> Iterator[Any]:
    """Answer each worker that asks for a task, and yield what else they send, until all have ended."""
    while workers:
        for pipe in [pipe for pipe in wait(list(workers)) if isinstance(pipe, Connection)]:
            try:
                message = pipe.recv()
                if message is None and (task := next(tasks, None)) is not None:
                    pipe.send(task)
                    continue
            except (EOFError, OSError):
                raise _killed(workers[pipe]) from None
            if message is None:
                pipe.close()  # which ends it
                workers.pop(pipe).join()
            elif isinstance(message, ConfigError):
                raise message
            else:
                yield message


def _start(work: Any, num_threads: int) -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")  # a fork would take along half of what threads were doing
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs, num_threads), daemon=True)
    # Ctrl-C goes to all, and the parent ends the others: one that is being started must not answer it with a traceback. A child inherits
    # what is blocked; the parent hears of a signal that came meanwhile as soon as it listens again.
    resource_tracker.ensure_running()  # it unblocks SIGINT when it is started, which the first process would do
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def _serve(work: Any, pipe: Connection, num_threads: int) -> None:
    """In a worker: ask for a task, report on it, and ask again, as long as somebody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # the tokenizer's: all cores, but no more
    os.environ["TOKENIZERS_PARALLELISM"] = str(num_threads > 1).lower()
    try:
        while True:
            pipe.send(None)
            for report in work(pipe.recv()):
                pipe.send(report)
    except (EOFError, ConnectionError):
        return
    except ConfigError as error:
        pipe.send(error)


def _killed(process: BaseProcess) -> Exception:
    process.join()
    code = process.exitcode or 0
    if code < 0:
        text = f"num_workers: a process was killed by signal {-code}, as when memory runs out"
        return ConfigError(f"{text}: give fewer, and the same command goes on where this one stopped")
    return RuntimeError(f"a process ended with exit code {code}; its own error stands above")
