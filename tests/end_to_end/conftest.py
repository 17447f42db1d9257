"""Starts runs as a person does, under Lightning's own launcher or under torchrun, and watches them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

START_S = 120  # importing torch and Lightning, on a busy machine
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCHERS = ("lightning", "torchrun")


class Run:
    """A command that is running, the leader of its own process group; its processes are known by a variable in their environment."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.name = f"END_TO_END_RUN={uuid.uuid4()}"
        self.log = folder / f"output-{self.name[-4:]}.txt"
        with self.log.open("w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict([self.name.split("=")])
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float = START_S) -> int:
        """The exit code, when all processes of the run have ended."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.members():  # a worker of a DataLoader looks for its rank every 5 s
            assert time.monotonic() < deadline, f"still running after {timeout_s} s\n{self.output}"
            time.sleep(0.05)
        return self.process.returncode

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.output}"
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def members(self) -> list[int]:
        """Ids of its processes that are running, also of those that torchrun gave a session of their own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or one that has ended meanwhile
                found += [int(path.parent.name)] if self.name.encode() in path.read_bytes() else []
        return found

    def close(self) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Starter:
    """Starts Python in a folder; what is still running at the end of the test is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: list[Run] = []

    def __call__(self, *arguments: str | Path, launcher: str = "lightning", processes: int = 2) -> Run:
        started = [*TORCHRUN, str(processes)] if launcher == "torchrun" else []
        self._runs.append(Run([sys.executable, *started, *map(str, arguments)], self.folder))
        return self._runs[-1]

    def shell(self, command: str) -> Run:
        """A line as it stands in the documentation."""
        self._runs.append(Run(["bash", "-c", command], self.folder))
        return self._runs[-1]

    def close(self) -> None:
        for run in self._runs:
            run.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.close()


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a recipe can name `double.Diary`, and a command `python` and `torchrun`."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one process, which those on many nodes must equal."""
    from end_to_end.test_elastic import recipe

    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        run = Run([sys.executable, "-m", "lightning_3d", "fit", "--config", str(recipe(folder))], folder)
        try:
            assert run.wait() == 0, run.output
        finally:
            run.close()
    return folder
