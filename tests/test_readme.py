"""Every command and program in README.md runs, in a copy of the repository, as a reader would run it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for name in ("lightning_3d", "recipes", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(command: list[str], folder: Path, timeout_s: int) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_commands(copy: Path) -> None:
    assert len(COMMANDS) >= 4
    outputs = {command: run(["bash", "-c", command], copy, 240) for command in COMMANDS}  # the later ones use what the earlier ones made
    for name, text in {"validate": "val_lm_loss", "inspect": "tokens a document", "generate": "def __init__(self", "export": "->"}.items():
        assert all(text in output for command, output in outputs.items() if f"lightning_3d {name} " in command), name
    assert (copy / "runs/mine_hf/model.safetensors").is_file()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs(number: int, copy: Path) -> None:
    script = copy / f"program_{number}.py"
    script.write_text(PROGRAMS[number])
    run([sys.executable, str(script)], copy, 240)
