"""A module of the user's own, a GPT-2 in ranks_gpt.py, trains in every layout as under a plain Trainer."""

import pytest
from comparison import Seen, assert_same_training
from ranks_fit import Case, fit

from lightning_3d.testing import RankPool


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> Seen:
    return pool.run(fit, 1, (Case(None),))[0]


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1)], ids=str)
def test_gpt(layout: tuple[int, int, int], plain: Seen, pool: RankPool) -> None:
    case = Case(layout)
    assert_same_training(pool.run(fit, case.world_size, (case,)), plain)
