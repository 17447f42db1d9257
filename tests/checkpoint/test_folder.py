"""A checkpoint is there once it is whole, and not a moment before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_3d.checkpoint import clear_leftovers, is_whole, latest_checkpoint, remove, step_folder, whole_steps
from lightning_3d.checkpoint.folder import begin, commit, unfinished
from lightning_3d.checkpoint.manifest import entries_of, write_manifest


def write(folder: Path, text: str = "") -> Path:
    """A whole checkpoint, as `save` leaves it beside."""
    place = begin(folder)
    for name in (".metadata", "trainer.pt", "__0_0.distcp"):
        (place / name).write_text(text)
    write_manifest(place, entries_of(place.iterdir()))
    return place


def test_it_appears_at_once(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 7)
    place = write(folder)
    assert whole_steps(tmp_path) == []
    commit(folder)
    assert whole_steps(tmp_path) == [7]
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    assert not place.exists()


@pytest.mark.parametrize("missing", [".metadata", "trainer.pt", "__0_0.distcp", "manifest.json"])
def test_a_part_is_no_checkpoint(missing: str, tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 7)
    write(folder)
    commit(folder)
    (folder / missing).unlink()
    assert not is_whole(folder)
    assert latest_checkpoint(tmp_path) is None


def test_the_newest_is_that_of_the_last_step(tmp_path: Path) -> None:
    """By number, not by name; whatever else lies there is passed over."""
    for step in (9, 100, 20):
        write(step_folder(tmp_path, step))
        commit(step_folder(tmp_path, step))
    write(step_folder(tmp_path, 200))
    for name in ("step-300", "step-400.old", "a-step-500", "step--1"):
        (tmp_path / name).mkdir()
    assert whole_steps(tmp_path) == [9, 20, 100]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_an_older_one_of_the_same_name_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    for text in ("old", "new"):
        write(folder, text)
        assert not folder.exists() or (folder / "trainer.pt").read_text() == "old"
        commit(folder)
    assert (folder / "trainer.pt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_it_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    """What a plain Trainer and ModelCheckpoint(save_last="link") leave there; what the link names stays."""
    (tmp_path / "file").write_text("of a plain Trainer")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    for name in ("file", "link"):
        write(tmp_path / name)
        commit(tmp_path / name)
        assert is_whole(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept", "link"]


def test_a_second_try_begins_with_an_empty_place(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    (begin(folder) / "__7_0.distcp").write_text("of a run of 8 ranks that was killed")
    assert list(begin(folder).iterdir()) == []


def test_removal_hides_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of it, the run leaves nothing that looks whole, and the next one clears it away."""
    folder = step_folder(tmp_path, 3)
    write(folder)
    commit(folder)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(folder)
    begin(step_folder(tmp_path, 4))
    assert whole_steps(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 2
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_clearing_touches_nothing_else(tmp_path: Path) -> None:
    write(step_folder(tmp_path, 1))
    commit(step_folder(tmp_path, 1))
    for name in (".cache", ".step-x.unfinished", "step-2.unfinished"):
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path)
    clear_leftovers(tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == [".cache", ".step-x.unfinished", "step-1", "step-2.unfinished"]
    assert unfinished(tmp_path / "step-1").name == ".step-1.unfinished"


def test_looking_while_others_remove(tmp_path: Path) -> None:
    """A run removes old checkpoints at any moment: whoever looks sees them, or does not."""
    code = (
        "import sys; from pathlib import Path\n"
        "from lightning_3d.checkpoint import remove, step_folder\n"
        "from tests.checkpoint.test_folder import write\n"
        "from lightning_3d.checkpoint.folder import commit\n"
        "root = Path(sys.argv[1])\n"
        "for n in range(300):\n"
        "    write(step_folder(root, n)); commit(step_folder(root, n)); n > 1 and remove(step_folder(root, n - 2))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2]) as other:
        while other.poll() is None:
            assert len(whole_steps(tmp_path)) <= 3
    assert other.returncode == 0
    assert whole_steps(tmp_path) == [298, 299]
