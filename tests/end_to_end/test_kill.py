"""Ranks are killed at random moments, also in the middle of a save: each start goes on from a whole checkpoint, to the same weights."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from end_to_end.conftest import Starter
from end_to_end.test_elastic import HERE, recipe

from lightning_3d.checkpoint import whole_steps
from lightning_3d.checkpoint.manifest import damage, entries_of

KILLS = pytest.mark.parametrize(
    ("in_background", "kills"),
    [
        pytest.param(True, 2, id="async-2"),
        *(pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in {"sync-20": (False, 20), "async-20": (True, 20)}.items()),
    ],
)
STRIDE = 10  # steps from one kill to the next, or a few more
SPARE = 100  # steps from the last kill to the end: seconds, for a slow machine to kill in
END_S = 60


class Ranks:
    """Two ranks, started as often as one likes (killable.py)."""

    def __init__(self, log: Path) -> None:
        self.log = log
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.pids: list[int] = []
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "killable.py"), "2"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                cwd=log.parent,
            )

    def start(self, config: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(["fit", "--config", str(config), "--ckpt_path", "auto"]) + "\n")
        self.process.stdin.flush()
        self.pids = self._read()

    def end(self) -> list[int]:
        """Wait for them; their exit codes."""
        codes = self._read()
        self.pids = []
        return codes

    def _read(self) -> list[int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return list(json.loads(line))

    def signal(self, signum: int, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            os.kill(self.pids[rank], signum)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks") / "output.txt")
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(server: Ranks) -> Iterator[Ranks]:
    yield server
    if server.pids:  # the test failed
        with suppress(ProcessLookupError):
            server.signal(signal.SIGKILL)
        server.end()


def newest(folder: Path) -> int:
    steps = whole_steps(folder)
    return steps[-1] if steps else 0


def wait_for(ranks: Ranks, condition: Callable[[], bool], every_s: float = 0.01) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, ranks.log.read_text()
        time.sleep(every_s)


def stop_in_a_save(ranks: Ranks, checkpoints: Path, delay_s: float) -> None:
    """Stop both ranks when a save has begun, and has not ended meanwhile."""
    while True:
        wait_for(ranks, lambda: any(checkpoints.glob(".step-*.unfinished")), every_s=0)
        time.sleep(delay_s)
        ranks.signal(signal.SIGSTOP)
        if any(checkpoints.glob(".step-*.unfinished")):
            return
        ranks.signal(signal.SIGCONT)
        delay_s /= 2


@KILLS
@pytest.mark.timeout(600)
def test_killed_again_and_again(ranks: Ranks, tmp_path: Path, in_background: bool, kills: int) -> None:
    """One rank or both; what is visible afterwards is whole, and it is what the next start goes on from, or it would be refused."""
    generator, last = random.Random(f"{in_background}{kills}"), STRIDE * kills + SPARE
    checkpoints = tmp_path / "killed" / "checkpoints"
    options = {"steps": last, "strategy": {"pp": 2, "async_checkpoint": in_background}}
    config = recipe(tmp_path / "killed", pause_s=0.03, **options)
    for number in range(1, kills + 1):
        ranks.start(config)
        wait_for(ranks, lambda step=STRIDE * number: newest(checkpoints) >= step)
        if number % 2:
            stop_in_a_save(ranks, checkpoints, generator.uniform(0, 0.03))
        else:
            time.sleep(generator.uniform(0, 0.15))
        killed = generator.choice([[0], [1], [0, 1]])
        ranks.signal(signal.SIGKILL, *killed)
        ranks.signal(signal.SIGCONT)
        codes = ranks.end()
        assert [codes[rank] for rank in killed] == [-signal.SIGKILL] * len(killed)
        assert 0 not in codes
        assert_whole(checkpoints)
        assert STRIDE * number <= newest(checkpoints) < last
    ranks.start(recipe(tmp_path / "killed", **options))
    assert ranks.end() == [0, 0], ranks.log.read_text()
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(f"step-{step}" for step in (last - 4, last - 2, last))
    straight = recipe(tmp_path / "straight", **options)
    ranks.start(straight)
    assert ranks.end() == [0, 0], ranks.log.read_text()
    assert shards(checkpoints, last) == shards(tmp_path / "straight" / "checkpoints", last)


def assert_whole(checkpoints: Path) -> None:
    """All that has a name of a checkpoint."""
    folders = list(checkpoints.glob("step-*"))
    assert sorted(int(folder.name.removeprefix("step-")) for folder in folders) == whole_steps(checkpoints)
    assert [damage(folder) for folder in folders] == [None] * len(folders)


def shards(checkpoints: Path, step: int) -> dict[str, object]:
    """Sizes and checksums of what the ranks wrote: weights and moments."""
    return dict(entries_of(sorted((checkpoints / f"step-{step}").glob("*.distcp"))))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_path")
def test_two_runs_and_one_folder(ranks: Ranks, start: Starter) -> None:
    """The second, in any layout, is told who is there, and leaves everything as it is; once the first has ended the folder is free."""
    config, checkpoints = (
        recipe(start.folder / "shared", pause_s=0.01, steps=100_000, strategy={"pp": 2}),
        start.folder / "shared/checkpoints",
    )
    ranks.start(config)
    wait_for(ranks, lambda: newest(checkpoints) > 0)
    fit = ["-m", "lightning_3d", "fit", "--config", config, "--ckpt_path", "auto", "--trainer.strategy.pp", "1"]
    second = start(*fit)
    assert second.wait() == 2, second.output
    message = f"is being written to by another run (process {ranks.pids[0]} on {os.uname().nodename}): wait for its end, or choose"
    assert f"error: checkpoints_path={checkpoints} {message}" in second.output
    ranks.signal(signal.SIGTERM, 1)
    assert ranks.end() == [143, 143]
    assert_whole(checkpoints)
    third = start(*fit, "--trainer.max_steps", newest(checkpoints) + 2)
    assert third.wait() == 0, third.output
