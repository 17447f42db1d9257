"""Lightning's own callbacks and loggers, unmodified: on every rank the numbers of one process."""

import csv
from pathlib import Path

import pytest
from ranks_callbacks import averaged, everything
from ranks_fit import Case

from lightning_3d.testing import RankPool


def csv_rows(folder: Path) -> list[dict[str, float]]:
    with open(folder / "csv" / "metrics.csv") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def tensorboard_rows(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_callbacks_and_loggers(pool: RankPool, tmp_path: Path) -> None:
    (plain,) = pool.run(everything, 1, (Case(None), str(tmp_path / "plain")))
    assert plain["stopped"] == 2
    assert plain["step"] == 4 + 2 + 2  # GradientAccumulationScheduler doubles after the first epoch
    for layout in ((1, 1, 2), (2, 1, 2)):
        folder = tmp_path / str(layout)
        case = Case(layout)
        ranks = pool.run(everything, case.world_size, (case, str(folder)))
        for seen in ranks:
            assert {key: seen[key] for key in ("paths", "stopped", "step")} == {key: plain[key] for key in ("paths", "stopped", "step")}
            assert seen["scores"] == ranks[0]["scores"] == pytest.approx(plain["scores"], rel=0, abs=1e-12)
            assert seen["seen"] == ranks[0]["seen"]
        for mine, theirs in zip(ranks[0]["seen"], plain["seen"], strict=True):
            assert mine == pytest.approx(theirs, rel=0, abs=1e-10)
        best, last, *kept = plain["paths"]
        assert {path.name for path in (folder / "best").iterdir()} == {last, *kept}
        assert (folder / "best" / best).is_dir()
        check_logs(folder, tmp_path / "plain")


def check_logs(folder: Path, plain: Path) -> None:
    rows = csv_rows(plain)
    assert {key for row in rows for key in row} >= {"loss", "double", "val_loss", "lr-SGD", "step", "epoch"}
    for mine, theirs in zip(csv_rows(folder), rows, strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-10)
    scalars = tensorboard_rows(plain)
    assert scalars.keys() >= {"loss", "val_loss", "lr-SGD"}
    mine = tensorboard_rows(folder)
    assert mine.keys() == scalars.keys()
    for tag, events in scalars.items():
        assert [step for step, _ in mine[tag]] == [step for step, _ in events]
        assert [value for _, value in mine[tag]] == pytest.approx([value for _, value in events], rel=1e-6)


def test_averaging_rich_bar_and_timer(pool: RankPool) -> None:
    (plain,) = pool.run(averaged, 1, (Case(None),))
    ranks = pool.run(averaged, 2, (Case((1, 1, 2)),))
    for seen in ranks:
        assert seen["step"] == plain["step"] == 8
        assert seen["timed"] == ranks[0]["timed"] > 0
        assert seen["shown"] == pytest.approx(plain["shown"], abs=1e-4)
