"""Clipping knows the whole model: the norm is over all stages, shards and tensor-parallel parts, and each element counts once."""

import math

import pytest
import torch
from comparison import Seen, assert_same_training
from ranks_fit import Case, fit, fit_with_maximum

from lightning_3d.testing import RankPool

LAYOUTS = [
    ((1, 1, 2), {}),
    ((2, 1, 2), {}),
    ((1, 2, 2), {"sequence_parallel": True}),
    ((2, 2, 1), {"data_parallel": "fsdp", "sequence_parallel": True}),
    ((4, 1, 1), {"data_parallel": "hsdp", "dp_replicate": 2}),
]
LIMIT = {"norm": 0.05, "value": 0.01}


def norm(gradients: dict[str, torch.Tensor], norm_type: float = 2.0) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm(norm_type))


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> dict[str, Seen]:
    options = {how: {"gradient_clip_val": limit, "gradient_clip_algorithm": how} for how, limit in LIMIT.items()}
    return {how: pool.run(fit, 1, (Case(None, trainer=options[how]),))[0] for how in LIMIT}


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=lambda value: str(value) if isinstance(value, tuple) else None)
@pytest.mark.parametrize("how", LIMIT)
def test_clipped_training(how: str, layout: tuple[int, int, int], strategy: dict, plain: dict[str, Seen], pool: RankPool) -> None:
    case = Case(layout, strategy=strategy, trainer={"gradient_clip_val": LIMIT[how], "gradient_clip_algorithm": how})
    ranks = pool.run(fit, case.world_size, (case,))
    assert_same_training(ranks, plain[how])
    for seen in ranks:
        if how == "norm":  # of the unclipped gradients
            expected = [norm(gradients) for gradients in plain[how]["gradients"]]
            assert min(expected) > 2 * LIMIT[how]
            assert seen["norms"] == pytest.approx(expected, rel=0, abs=1e-12)
        else:
            assert seen["norms"] == [None] * 4


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS[1:4], ids=lambda value: str(value) if isinstance(value, tuple) else None)
def test_largest_gradient(layout: tuple[int, int, int], strategy: dict, plain: dict[str, Seen], pool: RankPool) -> None:
    case = Case(layout, strategy=strategy, trainer={"max_steps": 1})
    expected = norm(plain["norm"]["gradients"][0], math.inf)
    assert pool.run(fit_with_maximum, case.world_size, (case,)) == pytest.approx([expected] * case.world_size, rel=0, abs=1e-12)
