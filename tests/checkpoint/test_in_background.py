"""Saves in the background that this package's own callback did not ask for."""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path

SCRIPT = Path(__file__).with_name("one_rank_async.py")


def test_with_model_checkpoint_and_by_hand(tmp_path: Path) -> None:
    """Lightning removes the older checkpoint right after a save: never before the newer is whole. After the run a save has ended."""
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *steps, mine = [literal_eval(line) for line in done.stdout.splitlines() if line.startswith(("[", "True", "False"))]
    assert steps[:3] == [[], [], []]  # it does not wait for the first
    assert all(len(names) == 1 for names in steps[4:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step=8.ckpt"]
    assert mine is True
