"""README and documentation: every command and program runs as a reader would run it, in a copy of the repository; the site builds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# many-nodes.md is run by end_to_end/test_many_nodes.py and test_slurm.py.
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.stem != "many-nodes")]
# ```bash and ```python are executed here, page after page, README first; ```text is for what no test can type (a placeholder, an output).
BLOCKS = [(page, *block) for page in PAGES for block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)]
COMMANDS = list(dict.fromkeys(line for _, kind, block in BLOCKS if kind == "bash" for line in block.splitlines()))
PROGRAMS = [(page.stem, block) for page, kind, block in BLOCKS if kind == "python" and "Trainer(" in block]
SNIPPETS = [block for _, kind, block in BLOCKS if kind == "python" and "Trainer(" not in block]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
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


@pytest.mark.timeout(1200)
def test_commands(copy: Path) -> None:
    assert len(COMMANDS) >= 10
    outputs = {command: run(["bash", "-c", command], copy, 240) for command in COMMANDS}  # the later ones use what the earlier ones made
    said = {"fit": "of tensors a rank", "validate": "val_lm_loss", "inspect": "tokens a document", "generate": "def __init__(self"}
    for name, text in (said | {"export": "->", "plan": "verdict"}).items():
        of_command = [output for command, output in outputs.items() if f"lightning_3d {name} " in command and "--print_plan" not in command]
        assert of_command, name
        assert all(text in output for output in of_command), name
    assert (copy / "runs/mine_hf/model.safetensors").is_file()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(PROGRAMS)])
def test_programs(page: str, program: str, copy: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page}.py"
    script.write_text(program)
    run([sys.executable, str(script)], copy, 240)


@pytest.mark.timeout(300)
def test_snippets(copy: Path, tmp_path: Path) -> None:
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(SNIPPETS))
    run([sys.executable, str(script)], copy, 240)


def test_blocks_are_of_a_kind_that_is_executed_or_says_that_it_is_not() -> None:
    assert {kind for _, kind, _ in BLOCKS} <= {"bash", "python", "text", ""}


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], ROOT, 240)
    errors = (tmp_path / "site/errors/index.html").read_text()
    assert "does not divide dp=" in errors
    assert (tmp_path / "site/pictures/schedule.svg").stat().st_size > 1000
