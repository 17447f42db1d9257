"""Whatever a user does to the loss, gradients are those of one process: they are linear in it."""

from dataclasses import replace

import pytest
from comparison import assert_same_training
from ranks_fit import Case, fit
from ranks_loss import BackwardTwice, Decayed, KeepsGradients, Manual, Quarter, Toggled, Twice, TwoOptimizers

from lightning_3d.testing import RankPool

ACCUMULATE = {"accumulate_grad_batches": 2}
CASES = {
    "scaled": (Case(None, Quarter), [(1, 1, 2), (2, 1, 2)]),
    "l2": (Case(None, Decayed), [(1, 1, 2), (2, 1, 2), (1, 2, 2)]),
    "l2-accumulated": (Case(None, Decayed, trainer=ACCUMULATE), [(1, 1, 1), (2, 1, 2), (1, 2, 2)]),
    "two-steps": (Case(None, Twice), [(1, 1, 1), (2, 1, 2)]),
    "two-steps-accumulated": (Case(None, Twice, trainer={"accumulate_grad_batches": 3}), [(2, 1, 2)]),  # of four: three and one
    "manual": (Case(None, Manual), [(1, 1, 1), (2, 1, 2)]),
    "manual-toggled": (Case(None, Toggled), [(2, 1, 1), (2, 1, 2)]),
    "no-zero-grad": (Case(None, KeepsGradients), [(1, 1, 2), (2, 1, 1)]),
    "two-optimizers": (Case(None, TwoOptimizers), [(1, 1, 2), (2, 2, 1)]),
}
FSDP = {"l2": (2, 2, 1), "l2-accumulated": (2, 1, 2), "two-steps-accumulated": (2, 1, 1), "manual": (2, 1, 2)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_changed_loss(name: str, pool: RankPool) -> None:
    case, layouts = CASES[name]
    plain = pool.run(fit, 1, (case,))[0]
    cases = [replace(case, layout=layout) for layout in layouts]
    if name in FSDP:
        cases.append(replace(case, layout=FSDP[name], strategy={"data_parallel": "fsdp"}))
    for layout in cases:
        assert_same_training(pool.run(fit, layout.world_size, (layout,)), plain, losses="l2" not in name)


def test_backward_twice_is_refused(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"backward\(\) was called twice on one pipeline_step\(\)"):
        pool.run(fit, 1, (Case((1, 1, 1), BackwardTwice),))
