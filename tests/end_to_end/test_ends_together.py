"""However a run ends, all of its processes end, soon, and with a checkpoint that goes on where it can be sound."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.conftest import Run, Starter

from lightning_3d.checkpoint import whole_steps

SCRIPT = Path(__file__).parent / "user_script.py"
END_S = 30


def losses(folder: Path, rank: int) -> list[tuple[int, float]]:
    """(step, loss) of each step, as the rank saw them."""
    path = folder / f"rank-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss)) for step, loss in (line.split() for line in lines)]


def told_to_stop(run: Run, tell: Callable[[Run], None]) -> int:
    """Tell a run that is in full swing; the exit code."""
    run.wait_for(lambda: len(losses(run.folder, 1)) >= 3)
    tell(run)
    return run.wait(END_S)


def rank_of(run: Run, rank: int) -> int:
    return int((run.folder / f"pid-{rank}").read_text())


def tell_rank(rank: int, signum: int = signal.SIGTERM) -> Callable[[Run], None]:
    return lambda run: os.kill(rank_of(run, rank), signum)


def tell_all(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGTERM)


def assert_saved_together(run: Run) -> int:
    """One whole checkpoint, of the step that all ranks did last."""
    steps = [losses(run.folder, rank)[-1][0] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert sorted(os.listdir(run.folder / "checkpoints")) == [f"step-{steps[0]}"]
    assert whole_steps(run.folder / "checkpoints") == steps[:1]
    assert (run.folder / "newest-1").read_text() == str(run.folder / "checkpoints" / f"step-{steps[0]}")
    return steps[0]


@pytest.mark.timeout(300)
def test_sigterm_to_rank_0_and_on_with_it(start: Starter) -> None:
    """The process that a user starts is rank 0; the others hear of it from the ranks' agreement."""
    run = start(SCRIPT, start.folder)
    assert told_to_stop(run, tell_rank(0)) == 143
    step = assert_saved_together(run)
    again = start(SCRIPT, start.folder, "--steps", str(step + 3))
    assert again.wait() == 0
    assert [[s for s, _ in losses(run.folder, rank)] for rank in (0, 1)] == [list(range(1, step + 4))] * 2
    assert losses(run.folder, 0) == losses(run.folder, 1)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launcher", "tell", "code"),
    [
        pytest.param("torchrun", tell_rank(1), 1, id="torchrun-rank_1", marks=pytest.mark.slow),
        pytest.param("lightning", tell_all, 143, id="lightning-all", marks=pytest.mark.slow),
        pytest.param("lightning", tell_rank(1, signal.SIGUSR1), 143, id="lightning-usr1"),
        pytest.param("torchrun", tell_all, 1, id="torchrun-all"),
    ],
)
def test_sigterm(launcher: str, tell: Callable[[Run], None], code: int, start: Starter) -> None:
    """To one rank that is not the first, or to all processes as SLURM does, torchrun's own included, which always ends with 1."""
    run = start(SCRIPT, start.folder, launcher=launcher)
    assert told_to_stop(run, tell) == code, run.output
    assert launcher == "lightning" or "exitcode  : 143" in run.output or "got signal: 15" in run.output
    assert_saved_together(run)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("torchrun", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("lightning", 0), ("lightning", 1), ("torchrun", 0)))],
)
def test_an_exception_on_one_rank(launcher: str, rank: int, start: Starter) -> None:
    """Two callbacks want to save then, must not wait for ranks that do not come, and do not say that they have saved."""
    run = start(SCRIPT, start.folder, "--fails_on_rank", str(rank), launcher=launcher)
    run.wait_for(lambda: len(losses(run.folder, rank)) == 2)
    assert run.wait(END_S) not in (0, 143)
    assert f"ZeroDivisionError: the model of rank {rank} is broken" in run.output
    assert whole_steps(run.folder / "checkpoints") == []
    assert (run.folder / f"newest-{rank}").read_text() == ""
