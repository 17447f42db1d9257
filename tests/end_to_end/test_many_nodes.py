"""Two nodes under torchrun, both on this host: every command of docs/many-nodes.md for it, and the losses of one process."""

import re
from pathlib import Path

import pytest
from end_to_end.conftest import Starter
from end_to_end.slurm import free_ports
from end_to_end.test_elastic import diary, recipe

PAGE = (Path(__file__).parents[2] / "docs" / "many-nodes.md").read_text()
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M) for line in block.replace("\\\n", " ").splitlines()]
TORCHRUN = [line for line in COMMANDS if line.startswith("torchrun")]
SLURM = [line for line in COMMANDS if line.startswith(("sbatch", "scancel"))]


def test_every_command_is_tested() -> None:
    assert len(TORCHRUN) == 2
    assert sorted(COMMANDS) == sorted(TORCHRUN + SLURM)


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("on_path")
def test_dp_over_nodes_tp_inside(start: Starter, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 agents with 2 processes each; the first command."""
    folder = start.folder / "two_nodes"
    options = {"HOST": "localhost", "PORT": free_ports(1)[0], "NODES": 2, "GPUS": 2, "RECIPE": recipe(folder, strategy={"tp": 2})}
    for name, value in options.items():
        monkeypatch.setenv(name, str(value))
    agents = [start.shell(TORCHRUN[0]) for _ in range(2)]
    for agent in agents:
        assert agent.wait() == 0, agent.output
    assert len({(folder / f"pid-{rank}").read_text() for rank in range(4)}) == 4
    expected = dict(diary(alone))
    for rank in range(4):
        assert dict(diary(folder, rank)) == pytest.approx(expected, abs=1e-10)
