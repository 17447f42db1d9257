"""Files that are not what was written: found and named when they are read, and an older checkpoint taken where that is wanted."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ranks_overtaking import Late
from ranks_resume import STEPS, Layout, Limited, Noisy, Run, fit

from lightning_3d.checkpoint import is_whole, step_folder, whole_steps
from lightning_3d.faults.rank_log import RankLog
from lightning_3d.testing import RankPool

RUN = Run(Layout(pp=2), "", checkpoint={"checkpoint_interval": 3})


@pytest.fixture(scope="module")
def run_of_six(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Its folder, with step 3 and 6, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, pool.run(fit, 2, (replace(RUN, folder=str(folder), trainer={"max_steps": 6}),))[0]["losses"]


@pytest.fixture
def saved(run_of_six: tuple[Path, list[float]]) -> Path:
    return run_of_six[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    (flip, "__1_0.distcp", "__1_0.distcp is not what was written: its checksum is another"),
    (flip, "trainer.pt", "trainer.pt is not what was written"),
    (flip, ".metadata", ".metadata is not what was written"),
    (cut, "__0_0.distcp", "bytes instead of"),
    (Path.unlink, "__0_0.distcp", "__0_0.distcp is missing"),
    (cut, "manifest.json", "manifest.json has"),
]


@pytest.mark.parametrize(("harm", "name", "message"), DAMAGE)
def test_damage_is_named(saved: Path, pool: RankPool, tmp_path: Path, harm: Callable[[Path], None], name: str, message: str) -> None:
    folder = shutil.copytree(step_folder(saved, 6), tmp_path / "step-6")
    assert is_whole(folder)
    harm(folder / name)
    assert is_whole(folder) == (harm is flip)  # contents are only read when they are loaded
    for seen in pool.run(fit, 2, (replace(RUN, folder=str(tmp_path / "new"), resume=str(folder)),)):
        assert f"ckpt_path={folder} is damaged: " in seen["error"]
        assert message in seen["error"]
        assert seen["losses"] == []


@pytest.mark.parametrize("harm", [flip, cut])
def test_an_older_one_is_taken(run_of_six: tuple[Path, list[float]], pool: RankPool, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """The run goes on from step 3, whatever was read of step 6, and saves that again; the damaged one is kept under another name."""
    saved, losses = run_of_six
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    harm(step_folder(root, 6) / "__0_0.distcp")
    run = replace(RUN, folder=str(root), resume=str(step_folder(root, 6)), resume_from_older=True)
    for seen in pool.run(fit, 2, (run,)):
        assert seen["first_step"] == 3
        assert seen["losses"][:3] == losses[3:]
        assert len(seen["losses"]) == STEPS - 3
    assert whole_steps(root) == [3, 6, 8]
    assert (root / "step-6.damaged").is_dir()


def test_none_is_left(saved: Path, pool: RankPool, tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    for step in (3, 6):
        flip(step_folder(root, step) / "__1_0.distcp")
    run = replace(RUN, folder=str(root), resume=str(step_folder(root, 6)), resume_from_older=True)
    for seen in pool.run(fit, 2, (run,)):
        assert f"ckpt_path={step_folder(root, 3)} is damaged: __1_0.distcp" in seen["error"]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_costs_nothing_but_itself(pool: RankPool, tmp_path: Path, background: bool) -> None:
    """Rank 1 cannot write more than a few KiB up to step 6: training goes on, without step 2 and 4."""
    run = Run(Layout(dp=2, mode="fsdp", background=background), str(tmp_path), checkpoint={"checkpoint_interval": 2})
    straight = pool.run(fit, 2, (replace(run, folder=str(tmp_path / "straight")),))
    limited = pool.run(fit, 2, (replace(run, folder=str(tmp_path / "limited"), callbacks=(partial(Limited, 8192, until=5),)),))
    assert [seen["losses"] for seen in limited] == [seen["losses"] for seen in straight]
    assert whole_steps(tmp_path / "straight") == [2, 4, 6, 8]
    assert whole_steps(tmp_path / "limited") == [6, 8]
    assert sorted(path.name for path in (tmp_path / "limited").iterdir()) == ["step-6", "step-8"]


def test_a_log_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("no folder")
    log = RankLog(str(tmp_path), 0)
    log.write("a line")
    log.write_stacks()
    assert (tmp_path / "ranks").read_text() == "no folder"


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_must_not_fail(pool: RankPool, tmp_path: Path, background: bool) -> None:
    run = Run(Layout(dp=2, mode="fsdp", background=background), str(tmp_path), checkpoint={"checkpoint_interval": 100})
    for seen in pool.run(fit, 2, (replace(run, callbacks=(partial(Limited, 8192, until=100),)),)):
        assert f"checkpoint {step_folder(tmp_path, STEPS)} was not written (" in seen["error"]
        assert " GiB are free there): rank 1: " in seen["error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, mode="fsdp"), Layout(pp=2), Layout(tp=2)], ids=str)
def test_in_the_background_it_is_the_same(layout: Layout, pool: RankPool, tmp_path: Path) -> None:
    """A checkpoint in every step, each of the state of its step though training has gone on; then resumed from the fifth.

    What several ranks hold is copied by the one that writes it.
    """
    run = Run(layout, str(tmp_path / "a"), checkpoint={"checkpoint_interval": 1})
    straight = pool.run(fit, 2, (run,))
    behind = replace(run, layout=replace(layout, background=True), folder=str(tmp_path / "b"), callbacks=(Late,))
    background = pool.run(fit, 2, (behind,))
    assert [seen["losses"] for seen in background] == [seen["losses"] for seen in straight]
    state = {key: value for seen in straight for key, value in seen["final"].items()}
    assert sum(seen["copied"] for seen in background) == sum(value.nbytes for value in state.values())
    assert whole_steps(tmp_path / "b") == list(range(1, STEPS + 1))
    again = replace(behind, folder=str(tmp_path / "c"), resume=str(step_folder(tmp_path / "b", 5)))
    for resumed, whole in zip(pool.run(fit, 2, (again,)), straight, strict=True):
        assert resumed["losses"] == whole["losses"][5:]
        assert all((resumed["final"][name] == value).all() for name, value in whole["final"].items())


def test_random_numbers_go_on(pool: RankPool, tmp_path: Path) -> None:
    run = Run(Layout(dp=2), str(tmp_path / "a"), module_type=Noisy)
    straight = pool.run(fit, 2, (run,))
    resumed = pool.run(fit, 2, (replace(run, folder=str(tmp_path / "b"), resume=str(step_folder(tmp_path / "a", 5))),))
    assert [seen["losses"] for seen in resumed] == [seen["losses"][5:] for seen in straight]
    assert straight[0]["losses"] != straight[1]["losses"]
