"""Modules of the user's own train in every layout as under a plain Trainer."""

from dataclasses import replace

import pytest
from comparison import Seen, assert_same_training
from ranks_fit import Case, fit
from ranks_modules import ByHand, ForModelParallel, Frozen, Plain, PlainManual, ShardedByHand, Thawing

from lightning_3d.testing import RankPool

SEQUENCE_PARALLEL = {"sequence_parallel": True}
FOUR_STAGES = {"batch_accumulation_per_replica": 4}
INTERLEAVED = {"pp_engine": "interleaved_1f1b", "virtual_stages": 2}


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> Seen:
    return pool.run(fit, 1, (Case(None),))[0]


def check(case: Case, plain: Seen, pool: RankPool) -> None:
    assert_same_training(pool.run(fit, case.world_size, (case,)), plain)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 2), {}),
        ((1, 1, 2), INTERLEAVED),
        ((1, 1, 4), FOUR_STAGES),
        ((2, 1, 2), {}),
        ((1, 2, 1), {}),
        ((1, 2, 2), SEQUENCE_PARALLEL),
        ((2, 2, 1), {"data_parallel": "fsdp"}),
    ],
    ids=str,
)
def test_gpt(layout: tuple[int, int, int], strategy: dict, plain: Seen, pool: RankPool) -> None:
    """Biases on row-cut layers, a head tied across stages, batches that are tuples, a split of its own."""
    check(Case(layout, strategy=strategy), plain, pool)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [((1, 1, 1), {"cp": 2}), ((1, 2, 1), {"cp": 2, "cp_method": "allgather"}), ((1, 1, 2), {"cp": 2, "cp_method": "ulysses"})],
    ids=str,
)
def test_gpt_with_cp(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    case = Case(layout, strategy=strategy, data={"length": 8})
    check(case, pool.run(fit, 1, (replace(case, layout=None, strategy={}),))[0], pool)


@pytest.mark.parametrize(
    ("engine", "microbatches"), [("afab", 1), ("afab", 3), ("1f1b", 3), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3)]
)
def test_numbers_of_microbatches(engine: str, microbatches: int, pool: RankPool) -> None:
    """Fewer than stages, and not a multiple of them, where the schedule can."""
    strategy = {"pp_engine": engine, "batch_accumulation_per_replica": microbatches, "virtual_stages": 2 if "inter" in engine else 1}
    case = Case((1, 1, 2), strategy=strategy, data={"rows": 6})
    check(case, pool.run(fit, 1, (replace(case, layout=None),))[0], pool)


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2), (2, 2, 1)], ids=str)
def test_parallelize_stage(layout: tuple[int, int, int], plain: Seen, pool: RankPool) -> None:
    check(Case(layout, ByHand), plain, pool)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("module", [Frozen, Thawing])
def test_frozen_parameters(module: type, layout: tuple[int, int, int], pool: RankPool) -> None:
    case = Case(layout, module)
    check(case, pool.run(fit, 1, (replace(case, layout=None),))[0], pool)


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 1, 2)], ids=str)
def test_fully_shard_in_parallelize_stage(layout: tuple[int, int, int], plain: Seen, pool: RankPool) -> None:
    check(Case(layout, ShardedByHand), plain, pool)


@pytest.mark.parametrize(
    ("module", "options"),
    [(Plain, {}), (Plain, {"accumulate_grad_batches": 2}), (Plain, {"gradient_clip_val": 0.05}), (PlainManual, {})],
    ids=str,
)
def test_module_without_a_pipeline(module: type, options: dict, pool: RankPool) -> None:
    """As under DDP: the mean of the replicas' gradients, from the first replica's weights."""
    case = Case(None, module, trainer=options)
    plain = pool.run(fit, 1, (case,))[0]
    ranks = pool.run(fit, 2, (replace(case, layout=(2, 1, 1)),))
    assert_same_training(ranks, plain, losses=False)
    assert ranks[0]["losses"] != ranks[1]["losses"] or module is PlainManual
    mean = [sum(losses) / 2 for losses in zip(*(seen["losses"] for seen in ranks), strict=True)]
    assert mean == pytest.approx(plain["losses"], rel=0, abs=1e-12)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_module_for_model_parallel_strategy(layout: tuple[int, int, int], options: dict, pool: RankPool) -> None:
    case = Case(None, ForModelParallel, trainer=options)
    plain = pool.run(fit, 1, (case,))[0]
    ranks = pool.run(fit, layout[0] * layout[1], (replace(case, layout=layout),))
    assert_same_training(ranks, plain, losses=False)
    for seen in ranks:
        assert seen["metrics"] == pytest.approx(plain["metrics"], rel=0, abs=1e-12)
