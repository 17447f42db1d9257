"""Layers split into stages, batches into microbatches."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.microbatch import check_equal, signature, split_batch, tensor_leaves
from lightning_3d.parallel.pipeline import split_layers
from lightning_3d.parallel.schedules import check_engine

COSTS = st.floats(0, 5)


def dearest(stages: list[range], first: float, last: float) -> float:
    costs = [float(len(stage)) for stage in stages]
    costs[0] += first
    costs[-1] += last
    return max(costs)


@given(layers=st.integers(1, 9), stages=st.integers(1, 9), first=COSTS, last=COSTS)
def test_split_of_layers_is_the_best_there_is(layers: int, stages: int, first: float, last: float) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=f"^pp x virtual_stages = {stages} stages, but num_hidden_layers={layers}"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages, first_cost=first, last_cost=last)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert len(split) == stages
    assert min(map(len, split)) >= 1
    every = ([range(a, b) for a, b in zip((0, *cuts), (*cuts, layers), strict=True)] for cuts in combinations(range(1, layers), stages - 1))
    assert dearest(split, first, last) == pytest.approx(min(dearest(other, first, last) for other in every))


def test_a_dear_head_takes_layers_off_the_last_stage() -> None:
    assert split_layers(12, 4) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    assert dearest(split_layers(14, 4, first_cost=1, last_cost=3), 1, 3) == 5
    assert len(split_layers(14, 4, first_cost=1, last_cost=3)[-1]) <= 2


@given(size=st.integers(1, 40), count=st.integers(1, 12))
def test_split_of_a_batch(size: int, count: int) -> None:
    batch = {"ids": torch.arange(size), "nested": [torch.arange(2 * size).reshape(size, 2), "a name"], "number": 3}
    parts = split_batch(batch, count)
    assert torch.equal(torch.cat([part["ids"] for part in parts]), batch["ids"])
    assert torch.equal(torch.cat([part["nested"][0] for part in parts]), batch["nested"][0])
    assert all(part["nested"][1] == "a name" and part["number"] == 3 for part in parts)
    lengths = [len(part["ids"]) for part in parts]
    assert len(parts) <= count
    assert lengths[:-1] == [-(-size // count)] * (len(parts) - 1)
    assert 1 <= lengths[-1] <= -(-size // count)
    if size % count == 0:
        check_equal(parts, count)
    else:
        with pytest.raises(ConfigError, match=rf"^batch_accumulation_per_replica={count} does not divide the batch of {size} sequences"):
            check_equal(parts, count)


@pytest.mark.parametrize("batch", [{"a": "b"}, torch.tensor(1.0), [torch.zeros(2), torch.zeros(3)], {}], ids=str)
def test_batches_that_cannot_be_split(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be split on dim 0: override split_batch\(\) in your module$"):
        split_batch(batch, 2)


def test_what_a_schedule_is_bound_to() -> None:
    batch = (torch.zeros(2, 3), {"x": torch.zeros(2, dtype=torch.int64)}, "text")
    assert [tuple(leaf.shape) for leaf in tensor_leaves(batch)] == [(2, 3), (2,)]
    outside = signature(batch)
    assert outside == signature((torch.ones(2, 3), {"x": torch.ones(2, dtype=torch.int64)}, "other"))
    assert outside != signature((torch.zeros(2, 3), {"x": torch.zeros(2)}, "text"))
    with torch.autocast("cpu", torch.bfloat16):
        assert signature(batch) != outside


@given(pp=st.integers(2, 8), microbatches=st.integers(1, 40))
def test_numbers_of_microbatches(pp: int, microbatches: int) -> None:
    check_engine("afab", pp=pp, virtual_stages=1, microbatches=microbatches)
    if microbatches < pp:
        with pytest.raises(
            ConfigError, match=rf"={microbatches} is too small for pp_engine=1f1b with pp={pp}: set it to {pp} or more or choose afab"
        ):
            check_engine("1f1b", pp=pp, virtual_stages=1, microbatches=microbatches)
    else:
        check_engine("1f1b", pp=pp, virtual_stages=1, microbatches=microbatches)
    if microbatches % pp == 0:
        check_engine("interleaved_1f1b", pp=pp, virtual_stages=2, microbatches=microbatches)
