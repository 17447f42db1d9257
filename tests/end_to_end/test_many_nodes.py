"""Two nodes under torchrun, both on this host: every command of docs/many-nodes.md for it, and the losses of one process."""

import re
from pathlib import Path

import pytest
from end_to_end.conftest import Starter
from end_to_end.slurm import free_ports
from end_to_end.test_elastic import QUICK, STEPS, diary, rank_of, reached, recipe

PAGE = (Path(__file__).parents[2] / "docs" / "many-nodes.md").read_text()
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M) for line in block.replace("\\\n", " ").splitlines()]
TORCHRUN = [line for line in COMMANDS if "torchrun " in line]
SLURM = [line for line in COMMANDS if line.startswith(("sbatch", "scancel"))]


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_every_command_is_tested() -> None:
    assert len(TORCHRUN) == 2
    assert sorted(COMMANDS) == sorted(TORCHRUN + SLURM)


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("on_path")
def test_dp_over_nodes_tp_inside(start: Starter, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 agents with 2 processes each; the first command."""
    folder = start.folder / "two_nodes"
    options = {"HOST": "localhost", "PORT": free_ports(1)[0], "NODES": 2, "GPUS": 2, "RECIPE": recipe(folder, strategy={"tp": 2})}
    set_all(monkeypatch, options)
    agents = [start.shell(TORCHRUN[0]) for _ in range(2)]
    for agent in agents:
        assert agent.wait() == 0, agent.output
    assert len({(folder / f"pid-{rank}").read_text() for rank in range(4)}) == 4
    expected = dict(diary(alone))
    for rank in range(4):
        assert dict(diary(folder, rank)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.slow  # three minutes
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("on_path")
def test_a_node_joins_and_leaves(start: Starter, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command: one agent, then two, then one again; the losses of one process throughout."""
    folder = start.folder / "elastic"
    config = recipe(folder, pause_s=2.0)
    set_all(monkeypatch, {"HOST": "localhost", "PORT": free_ports(1)[0], "NODES": 2, "GPUS": 1, "RECIPE": config})
    command = TORCHRUN[1].replace("--max-restarts", f"--rdzv-conf {QUICK} --max-restarts")
    host = start.shell(command)
    host.wait_for(lambda: reached(folder, 4))
    first = rank_of(folder, 0)
    guest = start.shell(command)
    host.wait_for(lambda: rank_of(folder, 0) != first and len(diary(folder, 1)) > 2)
    guest.close()
    assert host.wait(300) == 0, host.output
    expected = dict(diary(alone))
    assert sorted({step for step, _ in diary(folder)}) == list(range(1, STEPS + 1))
    for rank in range(2):
        assert max(abs(loss - expected[step]) for step, loss in diary(folder, rank)) < 1e-10
    assert {step for step, _ in diary(folder, 1)} < set(range(5, STEPS))
