"""Schedules as lists of actions: complete, without deadlock, with the bubble that their papers state; files that are none are refused."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.schedules import ENGINES, actions, check_engine, splits_backward, stage_coords
from lightning_3d.parallel.timeline import Action, check_actions, forward_order, makespan, simulate
from lightning_3d.strategy import ThreeDStrategy

PARTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward takes twice as long as a forward


def time_of(engine: str, pp: int, virtual: int, microbatches: int) -> float:
    """Of a step, where a whole microbatch takes 3 on one rank."""
    return makespan(simulate(actions(engine, pp, virtual, microbatches), lambda action: PARTS[action.kind] / virtual))


@given(st.sampled_from(list(ENGINES)), st.integers(2, 6), st.integers(1, 3), st.integers(1, 24))
def test_what_is_accepted_runs_to_its_end(engine: str, pp: int, virtual: int, microbatches: int) -> None:
    """And computes everything once, each stage where its placement says."""
    try:
        rows = actions(engine, pp, virtual, microbatches)
    except ConfigError:
        with pytest.raises(ConfigError):
            check_engine(engine, pp=pp, virtual_stages=virtual, microbatches=microbatches)
        return
    check_actions(rows, pp * virtual, microbatches)
    coords = stage_coords(engine, pp, virtual)
    assert all(coords[action.stage] == rank for rank, row in enumerate(rows) for action in row)
    assert splits_backward(engine) or all(action.kind in "FB" for row in rows for action in row)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_bubbles(pp: int, rounds: int) -> None:
    m = rounds * pp
    assert time_of("afab", pp, 1, m) == time_of("1f1b", pp, 1, m) == 3 * (m + pp - 1)
    for engine in ("interleaved_1f1b", "looped_bfs"):
        assert time_of(engine, pp, 2, m) == pytest.approx(3 * (m + (pp - 1) / 2))  # (p - 1) / (m v + p - 1) of the time
    assert time_of("zero_bubble", pp, 1, m) == 3 * m + pp - 1  # ZB-H1: a third of 1F1B's
    assert time_of("zbv", pp, 2, m) == 3 * m + (pp - 1) / 2  # the last rank starts later, and none waits
    assert time_of("dualpipe_v", pp, 2, m) < time_of("interleaved_1f1b", pp, 2, m)


def test_messages_take_time() -> None:
    rows = actions("1f1b", 2, 1, 2)
    assert makespan(simulate(rows, lambda action: PARTS[action.kind], transfer=0.5)) == 3 * 3 + 2 * 0.5


def test_a_timeline_is_by_rank_and_in_order() -> None:
    first, *_, last = simulate(actions("1f1b", 2, 1, 2), lambda action: PARTS[action.kind])
    assert (first.rank, str(first.action), first.start, first.end) == (0, "0F0", 0, 1)
    assert (last.rank, str(last.action), last.start, last.end) == (1, "1B1", 5, 7)


@given(st.permutations([0, 0, 1, 1, 2, 2]), st.integers(1, 9))
def test_forwards_in_an_order_that_all_ranks_can_follow(coords: list[int], microbatches: int) -> None:
    order = forward_order(coords, microbatches)
    done: set[Action] = set()
    for action in order:
        assert not action.stage or action._replace(stage=action.stage - 1) in done
        done.add(action)
    assert len(order) == len(done) == len(coords) * microbatches
    assert [action.microbatch for action in order if action.stage == 5] == list(range(microbatches))


def test_the_v_has_both_ends_on_one_rank() -> None:
    assert stage_coords("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert stage_coords("zero_bubble", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_coords("zbv", 1, 1) == (0,)


def write(path: Path, rows: list[str]) -> str:
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_a_file_as_torch_writes_it(tmp_path: Path) -> None:
    """Empty cells wait, overlapped actions are in brackets."""
    rows = actions("dualpipe_v", 2, 2, 4)
    path = tmp_path / "v.csv"
    lines = [",".join(["", *map(str, row)]) for row in rows]
    lines[0] = lines[0].replace("0F3,3B1", "(0F3;3B1)OVERLAP_F_B")
    assert "OVERLAP" in lines[0]
    assert actions(write(path, lines), 2, 2, 4) == rows
    assert stage_coords(str(path), 2, 2) == (0, 1, 1, 0)
    assert splits_backward(str(path))


GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0B0,0F0,0F1,0B1", GOOD[1]],
            "cannot run: it waits for ever: rank 0 at 0B0, which needs 0F0 and 1B0; rank 1 at 1F0, which needs 0F0",
        ),
        (
            ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"],
            "cannot run: it waits for ever: rank 0 at 0B0, which needs 1B0; rank 1 at 1F1, which needs 0F1",
        ),
        (["0F0,0F1,0B0", GOOD[1]], "cannot run: microbatch 1 on stage 0 has only 0F1: it needs F and B, or F, I and W"),
        (["0F0,0F2,0B0,0B2", "1F0,1B0,1F2,1B2"], "is for 3 microbatches, but batch_accumulation_per_replica=2: set it to 3"),
        (["0F0,0F1,0B0,0B1,0F0", GOOD[1]], "cannot run: 0F0 is on rank 0 twice"),
        (["0F0,0F1,0B0,0B1", "2F0,2B0,2F1,2B1"], "cannot run: 2F0 on rank 1 is none of 2 stages and 2 microbatches (from 0)"),
        (["0F0,0F1,1F0,0B0,0B1", GOOD[1]], "has stages [[0, 1], [1]] on its ranks, but virtual_stages=1: each rank needs that many"),
        (["0F0,0F1,0B0,0B1", "0F0"], "cannot run: 0F0 is on rank 1, but stage 0 is on rank 0"),
        ([*GOOD, GOOD[1]], "has rows for 3 ranks, but pp=2: it needs one row a rank"),
        (["0F0,0X0", GOOD[1]], "has '0X0' in row 0: a cell is stage, F, B, I or W, and microbatch, as 0F0"),
        (["0F0,0RECV_B0", GOOD[1]], "has '0RECV_B0' in row 0: a cell is stage, F, B, I or W, and microbatch, as 0F0"),
    ],
)
def test_files_that_cannot_be(rows: list[str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "schedule.csv", rows)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'pp_engine={path} {message}')}"):
        ThreeDStrategy(pp=2, pp_engine=path, batch_accumulation_per_replica=2)
    assert not torch.distributed.is_initialized()


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^pp_engine=none\.csv: there is no such file; name one, or choose from \['afab', "):
        ThreeDStrategy(pp=2, pp_engine="none.csv")
