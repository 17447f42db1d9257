"""Attention within documents in every kind of layout: as one process computes it, and that as one document at a time."""

from dataclasses import replace

import pytest
import torch
from comparison import Seen, assert_close, assert_same_training
from ranks_documents import ROWS, fit_packed, loss_document_by_document, rows
from ranks_fit import Case

from lightning_3d.testing import RankPool

LAYOUTS = {
    "pp2": ((1, 1, 2), {}),
    "pp2-interleaved": ((1, 1, 2), {"pp_engine": "interleaved_1f1b", "virtual_stages": 2}),
    "pp2-zbv": ((1, 1, 2), {"pp_engine": "zbv", "virtual_stages": 2}),
    "tp2": ((1, 2, 1), {}),
    "tp2-sp": ((1, 2, 1), {"sequence_parallel": True}),
    "dp2-fsdp": ((2, 1, 1), {"data_parallel": "fsdp"}),
    "tp2-pp2": ((1, 2, 2), {}),
    "tp2-pp2-sp": ((1, 2, 2), {"sequence_parallel": True}),
    "cp2-ring": ((1, 1, 1), {"cp": 2, "recompute": "selective"}),
    "cp2-allgather": ((1, 1, 1), {"cp": 2, "cp_method": "allgather"}),
    "cp2-ulysses": ((1, 1, 1), {"cp": 2, "cp_method": "ulysses"}),
    "cp4-ring": ((1, 1, 1), {"cp": 4, "data_parallel": "fsdp"}),
    "cp2-tp2-sp-ring": ((1, 2, 1), {"cp": 2, "sequence_parallel": True}),
    "cp2-pp2-allgather": ((1, 1, 2), {"cp": 2, "cp_method": "allgather"}),
    "cp2-dp2-ulysses": ((2, 1, 1), {"cp": 2, "cp_method": "ulysses"}),
}


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> Seen:
    return pool.run(fit_packed, 1, (Case(None),))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_attend_within_documents(name: str, plain: Seen, pool: RankPool) -> None:
    layout, strategy = LAYOUTS[name]
    case = replace(Case(layout), strategy=strategy)
    for rank, seen in enumerate(ranks := pool.run(fit_packed, case.world_size, (case,))):
        assert seen["val_lm_loss"] == pytest.approx(plain["val_lm_loss"], rel=0, abs=1e-12)
        dp = layout[0]  # a replica reads every dp-th row
        assert torch.equal(seen["predicted"], plain["predicted"][rank * dp // len(ranks) :: dp])
    assert_same_training(ranks, plain)


def test_one_process_is_as_good_as_a_document_at_a_time(plain: Seen) -> None:
    weights = {name: weight.requires_grad_() for name, weight in plain["start"].items()}
    loss = loss_document_by_document(weights, rows(ROWS))
    loss.backward()
    assert plain["losses"][0] == pytest.approx(loss.item(), rel=0, abs=1e-12)
    assert_close(plain["gradients"][0], {name: weight.grad for name, weight in weights.items()}, 1e-12, "gradient")
