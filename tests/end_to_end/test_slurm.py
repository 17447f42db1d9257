"""recipes/slurm.sh under a real SLURM of two virtual nodes: the commands of docs/many-nodes.md, and what becomes of a job."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end.slurm import MISSING, Slurm, wait_until
from end_to_end.test_elastic import STEPS, diary, rank_of, reached, recipe, shards
from end_to_end.test_many_nodes import SLURM

from lightning_3d.checkpoint import whole_steps

SUBMIT, STOP, CANCEL = SLURM
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs SLURM and munge (Debian: slurm-wlm, munge); not found: {', '.join(MISSING)}"),
    pytest.mark.usefixtures("on_path"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Callable[..., str]:
    """The command of the documentation, from a folder with the script."""
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "slurm.sh", tmp_path / "recipes")

    def run(config: Path, *options: str) -> str:
        slurm.environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"]}
        slurm.environment |= {"NODES": "2", "GPUS": "2", "RECIPE": str(config)}
        command = SUBMIT.replace("sbatch", " ".join(["sbatch", *options]))
        return slurm("bash", "-c", command, folder=tmp_path).split()[-1]

    return run


def output(folder: Path, job: str) -> str:
    path = folder / f"lightning_3d-{job}.out"
    return path.read_text() if path.exists() else "no output"


@pytest.mark.timeout(200)
def test_dp_over_nodes_tp_inside(slurm: Slurm, submit: Callable[..., str], alone: Path, tmp_path: Path) -> None:
    """2 nodes with 2 processes each: the losses of one process."""
    folder = tmp_path / "run"
    job = submit(recipe(folder, strategy={"tp": 2}))
    wait_until(lambda: slurm.state(job)[0] not in ("PENDING", "RUNNING", "COMPLETING"), 150, lambda: output(tmp_path, job))
    assert slurm.state(job) == ("COMPLETED", 0), output(tmp_path, job)
    expected = dict(diary(alone))
    for rank in range(4):
        assert dict(diary(folder, rank)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.slow  # three minutes
@pytest.mark.timeout(900)
def test_stopped_and_pre_empted(slurm: Slurm, submit: Callable[..., str], tmp_path: Path) -> None:
    """By hand, with a grace time, and without one: each time the job is queued again, once, and goes on; the weights are the same bits."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    first = submit(recipe(straight, strategy={"tp": 2}, checkpoint_interval=STEPS))
    slurm.wait(first, "COMPLETED", 200)
    job = submit(recipe(stopped, strategy={"tp": 2}, pause_s=0.5, checkpoint_interval=STEPS), "--partition=at_once")
    wait_until(lambda: reached(stopped, 5), 150, lambda: output(tmp_path, job))
    slurm("bash", "-c", STOP.replace("$JOB", job))
    slurm.wait(job, "PENDING", 60)
    assert slurm.state(job)[1] == 1, output(tmp_path, job)
    for restarts, step, partition in ((2, 15, "low"), (3, 25, "low")):
        wait_until(lambda step=step: reached(stopped, step), 200, lambda: output(tmp_path, job))  # type: ignore[misc]
        other = slurm("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true").strip()
        slurm.wait(other, "COMPLETED", 90)
        assert slurm.state(job) == ("PENDING", restarts), output(tmp_path, job)
        slurm("scontrol", "update", f"JobId={job}", f"Partition={partition}")
    slurm.wait(job, "COMPLETED", 200)
    steps = [step for step, _ in diary(stopped)]
    assert steps == list(range(1, STEPS + 1)), "no step twice: each stop saved the step that it stopped at"
    assert shards(stopped) == shards(straight)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cancelled(slurm: Slurm, submit: Callable[..., str], tmp_path: Path) -> None:
    """For good, with a checkpoint of the step that it stopped at."""
    folder = tmp_path / "run"
    job = submit(recipe(folder, strategy={"tp": 2}, pause_s=0.5, checkpoint_interval=STEPS))
    wait_until(lambda: reached(folder, 5), 150, lambda: output(tmp_path, job))
    slurm("bash", "-c", CANCEL.replace("$JOB", job))
    wait_until(lambda: slurm.state(job)[0] == "CANCELLED" and not slurm("squeue", "-h").strip(), 60, lambda: str(slurm.state(job)))
    assert slurm.state(job)[1] == 0
    assert whole_steps(folder / "checkpoints")[-1] == diary(folder)[-1][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_is_not_queued_again(slurm: Slurm, submit: Callable[..., str], tmp_path: Path) -> None:
    """A process that is killed: the others end by themselves."""
    folder = tmp_path / "run"
    job = submit(recipe(folder, strategy={"tp": 2}, pause_s=0.5))
    wait_until(lambda: reached(folder, 5), 150, lambda: output(tmp_path, job))
    os.kill(rank_of(folder, 1), signal.SIGKILL)
    slurm.wait(job, "FAILED", 100)
    assert slurm.state(job)[1] == 0
