"""Validation, test and predict: batches of any size and length, between and after training steps."""

from dataclasses import replace

import pytest
import torch
from comparison import Seen, assert_same_training
from ranks_evaluation import InferenceMode, Predicts, fit_then_test, refit, untrained
from ranks_fit import Case, fit

from lightning_3d.testing import RankPool

INTERLEAVED = {"pp_engine": "interleaved_1f1b", "virtual_stages": 2}
V_SHAPED = {"pp_engine": "zbv", "virtual_stages": 2}  # two stages that follow each other on one rank, the last one on rank 0
LAYOUTS = [((1, 1, 1), {}), ((1, 1, 2), {}), ((2, 1, 2), {"batch_accumulation_per_replica": 4}), ((1, 2, 2), {}), ((1, 1, 2), INTERLEAVED)]
LAYOUTS.append(((1, 1, 2), V_SHAPED))
# 22 sequences are batches of 8, 8 and 6; on each of two replicas 4, 4 and 3, which four microbatches do not divide
DATA = {"shorter": {"val": 22, "val_length": 4}, "longer": {"val": 22, "val_length": 9}, "equal": {"val": 22}}


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> dict[str, Seen]:
    return {name: pool.run(fit, 1, (Case(None, data=data, trainer={"max_epochs": 2}),))[0] for name, data in DATA.items()}


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=str)
@pytest.mark.parametrize("length", DATA)
def test_validation_loss(length: str, layout: tuple[int, int, int], strategy: dict, plain: dict[str, Seen], pool: RankPool) -> None:
    case = Case(layout, data=DATA[length], strategy=strategy, trainer={"max_epochs": 2})
    for seen in pool.run(fit, case.world_size, (case,)):
        assert seen["metrics"].keys() == {"loss", "double", "val_loss"}
        assert seen["metrics"] == pytest.approx(plain[length]["metrics"], rel=0, abs=1e-12)


@pytest.mark.parametrize(("layout", "strategy"), [LAYOUTS[2], LAYOUTS[4], ((2, 1, 2), V_SHAPED | {"data_parallel": "fsdp"})], ids=str)
def test_validation_between_two_halves_of_an_accumulation(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    without = Case(None, trainer={"accumulate_grad_batches": 2})
    case = replace(without, layout=layout, strategy=strategy, data={"val": 22}, trainer={"val_check_interval": 1, **without.trainer})
    plain = pool.run(fit, 1, (without,))[0]
    assert_same_training(pool.run(fit, case.world_size, (case,)), plain)


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS[1:4], ids=str)
def test_training_after_validation_in_inference_mode(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    options = {"num_sanity_val_steps": 2, "val_check_interval": 2}
    case = Case(layout, InferenceMode, strategy=strategy, data=DATA["longer"], trainer=options)
    plain = pool.run(fit, 1, (Case(None, data=DATA["longer"], trainer=options),))[0]
    ranks = pool.run(fit, case.world_size, (case,))
    assert_same_training(ranks, plain)
    for seen in ranks:
        assert seen["metrics"]["val_loss"] == pytest.approx(plain["metrics"]["val_loss"], rel=0, abs=1e-12)


@pytest.mark.parametrize(("layout", "strategy"), [*LAYOUTS[1:6:2], LAYOUTS[4], ((1, 2, 1), {"sequence_parallel": True})], ids=str)
def test_test_and_predict(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    """The vocabulary of 13 is not divisible by tp."""
    case = Case(layout, Predicts, strategy=strategy, data={"val": 22})
    plain = pool.run(fit_then_test, 1, (replace(case, layout=None, strategy={}),))[0]
    for rank in pool.run(fit_then_test, case.world_size, (case,)):
        for (metrics, ids), (plain_metrics, plain_ids) in zip(rank, plain, strict=True):
            assert metrics == pytest.approx(plain_metrics, rel=0, abs=1e-10)
            assert torch.equal(torch.cat(ids), torch.cat(plain_ids))


def test_predict_without_a_fit(pool: RankPool) -> None:
    case = Case((2, 2, 1), Predicts, strategy={"data_parallel": "fsdp"}, data={"val": 22})
    plain = torch.cat(pool.run(untrained, 1, (replace(case, layout=None, strategy={}),))[0])
    ranks = [torch.cat(ids) for ids in pool.run(untrained, 4, (case,))]
    assert torch.equal(ranks[0], ranks[1])  # of one replica, which reads every second sequence
    assert torch.equal(torch.stack((ranks[0], ranks[2]), 1).flatten(0, 1), plain)


def test_microbatches_of_each_data_module(pool: RankPool) -> None:
    first, last = pool.run(refit, 2, (Case((1, 1, 2), strategy={"batch_accumulation_per_replica": None}),))
    assert last == [2] * 4 + [4] * 4
    assert first == [0] * 8
