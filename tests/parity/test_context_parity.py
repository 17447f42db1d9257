"""Context parallelism computes what one process computes: alone and with every other axis, by each method."""

import pytest
from scenario import Scenario, run
from test_parity import check, name

from lightning_3d.testing import RankPool

FIRST = [Scenario(cp=2), Scenario(cp=2, method="allgather"), Scenario(cp=2, method="ulysses")]


@pytest.mark.parametrize("s", FIRST, ids=name)
def test_context_parallel_equals_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))
