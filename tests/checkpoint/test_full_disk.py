"""A disk that is full fails a save, not the run, and costs no older checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_3d.checkpoint import step_folder, whole_steps
from lightning_3d.checkpoint.manifest import damage

SCRIPT = Path(__file__).with_name("one_rank_full_disk.py")
SMALL_DISK = 'mkdir disk && mount -t tmpfs -o size=1m tmpfs disk || exit 77; "$@" && cp -r disk/run run'


@pytest.mark.timeout(150)
def test_a_full_disk(tmp_path: Path) -> None:
    """Of one MiB, in a name space of its own. There is no room for step 4, which is seen before, and too little for step 6."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    shell = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", sys.executable, str(SCRIPT), "disk/run"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    assert "checkpoint disk/run/step-4 was not written (0.00 GiB are free there): it needs 0.00 GiB; training goes on" in done.stderr
    assert "checkpoint disk/run/step-6 was not written" in done.stderr
    assert "No space left on device" in done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-8"]
    assert whole_steps(tmp_path / "run") == [2, 8]
    assert [damage(step_folder(tmp_path / "run", step)) for step in (2, 8)] == [None, None]
