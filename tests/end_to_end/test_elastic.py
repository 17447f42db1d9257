"""Under torchrun a run outlives its processes: it goes on from its newest checkpoint with those that are there, with the same losses."""

import os
import signal
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end.conftest import Starter

from lightning_3d.checkpoint import whole_steps
from lightning_3d.checkpoint.manifest import entries_of

HERE = Path(__file__).parent
DATA = str(HERE.parent / "data" / "nanoset_datatrove")
STEPS = 40
QUICK = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3"  # to notice that an agent is gone


def recipe(folder: Path, *, steps: int = STEPS, pause_s: float = 0.0, strategy: dict[str, Any] | None = None, **checkpoint: Any) -> Path:
    """As a user writes it who does not know how many processes there will be: nothing names their number."""
    folder.mkdir(exist_ok=True)
    llama = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    saves = {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": 2, "keep_last": 3, **checkpoint}
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy or {},
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {"class_path": "double.Diary", "init_args": {"folder": str(folder), "pause_s": pause_s}},
            {"class_path": "lightning_3d.Checkpoint", "init_args": saves},
        ],
    }
    data = {"dataset_folder": DATA, "sequence_length": 16, "global_batch_samples": 4, "num_workers": 1}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": {"llama": llama}, "data": data, "trainer": trainer}))
    return path


def torchrun(*options: str, config: Path) -> list[str | Path]:
    fit = ["-m", "lightning_3d", "fit", "--config", config, "--ckpt_path", "auto"]
    return ["-m", "torch.distributed.run", *options, "--rdzv-backend=c10d", *fit]


def node(port: int, config: Path, *, is_host: bool) -> list[str | Path]:
    """One of one or two nodes, each with one process."""
    joined = [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={QUICK},is_host={int(is_host)}"]
    return torchrun("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *joined, config=config)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def diary(folder: Path, rank: int = 0) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were trained; a line that a kill cut off is none."""
    path = folder / f"rank-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(int(step), float(loss)) for step, loss in (line.split() for line in lines if line.endswith("\n"))]


def reached(folder: Path, step: int) -> bool:
    return bool(diary(folder)) and diary(folder)[-1][0] >= step


def rank_of(folder: Path, rank: int) -> int:
    """Its process since the newest start."""
    return int((folder / f"pid-{rank}").read_text() or 0)


def shards(folder: Path) -> dict[str, Any]:
    """Sizes and checksums of what the ranks wrote last: weights and moments."""
    assert whole_steps(folder / "checkpoints")[-1] == STEPS
    return dict(entries_of(sorted((folder / "checkpoints" / f"step-{STEPS}").glob("*.distcp"))))


def assert_same_losses(folder: Path, straight: Path, *, restarts: int) -> None:
    """Every step in its place, those between a checkpoint and the kill twice."""
    expected = dict(diary(straight))
    assert sorted(expected) == list(range(1, STEPS + 1))
    seen = diary(folder)
    assert sorted({step for step, _ in seen}) == sorted(expected)
    assert sum(after <= before for (before, _), (after, _) in pairwise(seen)) == restarts
    assert max(abs(loss - expected[step]) for step, loss in seen) < 1e-10


@pytest.mark.slow  # two minutes; the next test restarts too
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_path")
def test_a_killed_worker(start: Starter) -> None:
    """Of either rank in turn: torchrun starts both again, and the last weights are those of a run that nothing happened to."""
    straight, killed = start.folder / "straight", start.folder / "killed"
    run = start(*torchrun("--nproc-per-node=2", "--rdzv-endpoint=localhost:0", config=recipe(straight)))
    assert run.wait() == 0, run.output
    restarting = ("--nproc-per-node=2", "--max-restarts=3", "--rdzv-endpoint=localhost:0")
    run = start(*torchrun(*restarting, config=recipe(killed, pause_s=0.1)))
    for rank, step in ((0, 9), (1, 21)):
        run.wait_for(lambda step=step: reached(killed, step))
        pid = rank_of(killed, rank)
        os.kill(pid, signal.SIGKILL)
        run.wait_for(lambda pid=pid, rank=rank: rank_of(killed, rank) != pid)
    assert run.wait() == 0, run.output
    assert_same_losses(killed, straight, restarts=2)
    assert shards(killed) == shards(straight)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_path")
def test_fewer_processes(start: Starter) -> None:
    """Two nodes, of which one is lost with all that ran there; the other goes on alone, with the same global batch."""
    straight, shrunk = start.folder / "straight", start.folder / "shrunk"
    run = start(*torchrun("--nproc-per-node=1", "--rdzv-endpoint=localhost:0", config=recipe(straight)))
    assert run.wait() == 0, run.output
    config, port = recipe(shrunk, pause_s=0.1), free_port()
    host, guest = (start(*node(port, config, is_host=first)) for first in (True, False))
    host.wait_for(lambda: reached(shrunk, 9))
    assert len(diary(shrunk, 1)) > 0
    guest.close()
    assert host.wait(200) == 0, host.output
    assert_same_losses(shrunk, straight, restarts=1)
    assert {step for step, _ in diary(shrunk, 1)} < set(range(1, 20))


@pytest.mark.slow  # a minute
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_path")
def test_more_processes(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node joins one that is training: told to stop, that one saves; both go on from there, with the same global batch.

    Else torch 2.13's first node, which keeps its store, tells the other no address (dynamic_rendezvous.py), and both fail after a minute.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    straight, grown = start.folder / "straight", start.folder / "grown"
    run = start(*torchrun("--nproc-per-node=1", "--rdzv-endpoint=localhost:0", config=recipe(straight)))
    assert run.wait() == 0, run.output
    config, port = recipe(grown, pause_s=1.0), free_port()
    host = start(*node(port, config, is_host=True))
    host.wait_for(lambda: reached(grown, 3))
    assert not diary(grown, 1)
    guest = start(*node(port, config, is_host=False))
    host.wait_for(lambda: bool(diary(grown, 1)))
    assert [host.wait(200), guest.wait(200)] == [0, 0], host.output + guest.output
    assert_same_losses(grown, straight, restarts=0)
    steps = [step for step, _ in diary(grown, 1)]
    assert steps == list(range(steps[0], STEPS + 1))


@pytest.mark.slow  # a minute
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_path")
def test_the_host_of_the_rendezvous_is_lost(start: Starter) -> None:
    """torchrun's store is gone with it: the other node ends too, and whoever starts it again goes on from the newest checkpoint."""
    straight, orphaned = start.folder / "straight", start.folder / "orphaned"
    run = start(*torchrun("--nproc-per-node=1", "--rdzv-endpoint=localhost:0", config=recipe(straight)))
    assert run.wait() == 0, run.output
    config, port = recipe(orphaned, pause_s=0.1), free_port()
    host, guest = (start(*node(port, config, is_host=first)) for first in (True, False))
    host.wait_for(lambda: reached(orphaned, 9))
    host.close()
    assert guest.wait(200) not in (0, None), guest.output
    again = start(*node(free_port(), config, is_host=True))
    assert again.wait(200) == 0, again.output
    assert_same_losses(orphaned, straight, restarts=1)
