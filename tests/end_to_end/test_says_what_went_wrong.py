"""Runs with a fault in one layer of one microbatch on one of four ranks: what a person is told."""

import re
from pathlib import Path

import pytest
from end_to_end.conftest import Starter

SCRIPT = Path(__file__).parent / "faulty.py"
PLACE = "forward of stage 1, microbatch 2, layers.3.mlp"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", ["lightning", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_one_error_with_its_place(launcher: str, start: Starter) -> None:
    run = start(SCRIPT, start.folder, "raises", "3", launcher=launcher, processes=4)
    assert run.wait() not in (0, 143)
    assert run.output.count("Traceback (") == 1
    error = run.output[run.output.index("error on rank") :].splitlines()
    error = [line for line in error if "Child process with PID" not in line]  # Lightning's launcher, of how it ends the others
    assert error[:2] == [f"error on rank 3 (pp=1, tp=1): {PLACE}", "  ZeroDivisionError: the layer is broken"]
    assert re.match(rf"  at {SCRIPT}:\d+ in hook: raise ZeroDivisionError", error[2])
    assert error[3] == f"  the logs of the ranks are in {start.folder}/ranks"
    assert launcher == "torchrun" or len(error) == 4, "it is the last that is said"
    log = (start.folder / "ranks" / "rank-003.log").read_text()
    assert "ZeroDivisionError: the layer is broken" in log
    assert "UserWarning: a warning of rank 3" in log
    assert "warning of rank 3" not in "".join(path.read_text() for path in start.folder.glob("ranks/rank-00[012].log"))


@pytest.mark.timeout(200)
def test_who_waits_for_whom(start: Starter) -> None:
    """Rank 3 sleeps in a layer: it is named, before the limit of 6 s ends the run; its tp peer waits for it, and stage 0 for both."""
    run = start(SCRIPT, start.folder, "sleeps", "3", processes=4)
    assert run.wait() not in (0, 143)
    report, error = run.output[run.output.index("no progress for") :].split("error on rank", 1)
    waits = dict(line.strip().split("): ", 1) for line in report.splitlines()[1:4])
    assert waits["rank 3 (pp=1, tp=1"].startswith(PLACE)
    assert waits["rank 3 (pp=1, tp=1"].endswith("in hook: time.sleep(1000)")
    assert re.match(rf"waits in all_gather\w*, {PLACE}.down_proj at", waits["rank 2 (pp=1, tp=0"])
    assert "waits in _wait_batch_p2p" in waits["rank 0 (pp=0, tp=0), rank 1 (pp=0, tp=1"]
    assert re.search(r"Timed out waiting 6000ms|longer than timeout_s", error)
    assert 'faulty.py", line' in (start.folder / "ranks" / "rank-003.log").read_text()  # its stack
