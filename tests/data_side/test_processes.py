"""Work in processes: every task once, whoever does it, and errors that come through."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lightning_3d.data.prepare.processes import in_processes
from lightning_3d.errors import ConfigError

SCRIPT = """
import os, sys, time
from lightning_3d.data.prepare.processes import in_processes
from lightning_3d.errors import ConfigError

def work(number):
    if number == 7 and sys.argv[1] == "user":
        raise ConfigError("seven")
    if number == 7 and sys.argv[1] == "bug":
        raise KeyError("seven")
    for part in range(3):
        yield number, part, os.getpid(), os.environ.get("RAYON_NUM_THREADS")

if __name__ == "__main__":
    for line in in_processes(work, range(int(sys.argv[3])), int(sys.argv[2])):
        print(*line, flush=True)
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run([sys.executable, "script.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_task_once(tmp_path: Path, num_workers: int) -> None:
    done = run(tmp_path, "well", str(num_workers), "20")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sorted((int(number), int(part)) for number, part, *_ in rows) == [(number, part) for number in range(20) for part in range(3)]
    assert 1 <= len({row[2] for row in rows}) <= num_workers
    threads = {row[3] for row in rows}
    assert threads == ({"None"} if num_workers == 1 else {str(max(1, (os.cpu_count() or 1) // num_workers))})
    assert (done.returncode, done.stderr) == (0, "")


def test_fewer_tasks_than_workers(tmp_path: Path) -> None:
    assert len(run(tmp_path, "well", "3", "1").stdout.splitlines()) == 3
    assert run(tmp_path, "well", "2", "0").stdout == ""


def test_errors(tmp_path: Path) -> None:
    done = run(tmp_path, "user", "2", "1000")
    assert done.stderr.splitlines()[-1] == "lightning_3d.errors.ConfigError: seven"
    assert len(done.stdout.splitlines()) < 3000
    done = run(tmp_path, "bug", "2", "1000")
    assert "KeyError: 'seven'" in done.stderr
    assert re.search("RuntimeError: a process ended with exit code 1; its own error stands above", done.stderr)


def here(limit: int, number: int) -> Iterator[int]:
    if number == limit:
        raise ConfigError(f"{number} is too many")
    yield number


def test_one_worker_is_this_process() -> None:
    reports = in_processes(partial(here, 2), range(5), 1)
    assert [next(reports), next(reports)] == [0, 1]
    with pytest.raises(ConfigError, match="2 is too many"):
        next(reports)


def test_a_worker_that_is_being_started_does_not_hear_ctrl_c(tmp_path: Path) -> None:
    """It would answer with a traceback of its own; the parent, which ends it, must hear."""
    script = """
import os, signal
from lightning_3d.data.prepare import processes

def masked(pid):
    line = next(line for line in open(f"/proc/{pid}/status") if line.startswith("SigBlk"))
    return int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1

def work(number):
    yield number

if __name__ == "__main__":
    _, process = processes._start(work, 1)
    print(masked(process.pid), masked(os.getpid()))
    process.kill()
"""
    (tmp_path / "start.py").write_text(script)
    done = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "0"], done.stderr
