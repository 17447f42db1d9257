"""Context parallelism computes what one process computes: alone and with every other axis, by each method.

On up to four ranks the options are chosen pairwise; on eight there is one case for cp=4 with each other axis. `make test-slow` takes more.
"""

from typing import Any

import pytest
from pairwise import pairwise
from scenario import Scenario, run
from test_parity import check, name

from lightning_3d.testing import RankPool

METHODS = ["ring", "allgather", "ulysses"]
SMALL = [(1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)]  # dp, tp, pp, cp
LARGE = [(2, 1, 1, 4), (1, 2, 1, 4), (1, 1, 2, 4), (4, 1, 1, 2), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2)]
OPTIONS: dict[str, list[Any]] = {
    "method": METHODS,
    "sequence_parallel": [False, True],
    "engine": ["1f1b", "interleaved_1f1b"],
    "mode": ["ddp", "zero2", "fsdp", "hsdp"],
    "tied": [False, True],
    "recompute": ["none", "full", "selective"],
    "loss_chunks": [1, 3],
}


def allowed(case: dict[str, Any]) -> bool:
    """Combinations that differ from another one."""
    dp, tp, pp, _ = case["layout"]
    if (tp == 1 and case["sequence_parallel"]) or (pp == 1 and case["engine"] != "1f1b"):
        return False
    return case["mode"] != "hsdp" or dp >= 2


def scenario(case: dict[str, Any]) -> Scenario:
    dp, tp, pp, cp = case["layout"]
    rest = {key: value for key, value in case.items() if key != "layout"}
    return Scenario(dp, tp, pp, cp=cp, virtual=2 if case["engine"] == "interleaved_1f1b" else 1, **rest)


def cases(layouts: list[tuple[int, int, int, int]]) -> list[Scenario]:
    chosen = [scenario(case) for case in pairwise({"layout": layouts, **OPTIONS}, allowed)]
    return sorted(chosen, key=lambda s: s.world_size)


SELECTED = [
    *cases(SMALL),
    Scenario(pp=2, cp=2, engine="afab", method="ulysses"),
    Scenario(pp=2, cp=2, engine="looped_bfs", virtual=2, method="allgather"),
    Scenario(pp=2, cp=2, engine="zero_bubble", virtual=2, mode="fsdp"),
    Scenario(pp=2, cp=2, engine="zbv", virtual=2, method="ulysses"),
    Scenario(pp=2, cp=2, engine="dualpipe_v", virtual=2),
    Scenario(dp=2, cp=4, method="ring", mode="hsdp"),
    Scenario(tp=2, cp=4, method="allgather", sequence_parallel=True, recompute="selective"),
    Scenario(pp=2, cp=4, method="ulysses", mode="fsdp", tied=True),
]


def label(s: Scenario) -> str:
    return f"cp{s.cp}-{s.method}-{name(s)}" + f"-{s.recompute}" * (s.recompute != "none")


@pytest.mark.parametrize("s", SELECTED, ids=label)
def test_context_parallel_equals_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))


@pytest.mark.slow
@pytest.mark.parametrize("s", cases(LARGE), ids=label)
def test_context_parallel_on_eight_ranks_equals_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))


def test_the_selection_has_every_method_on_every_layout() -> None:
    assert {((s.dp, s.tp, s.pp, s.cp), s.method) for s in SELECTED} >= {(layout, method) for layout in SMALL for method in METHODS}
