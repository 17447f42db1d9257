"""No host synchronisation on the hot path: between two logs no step reads a tensor's value."""

import pytest
from ranks_fit import Case
from ranks_synchronisation import STEPS, Reads, readings

from lightning_3d.testing import RankPool

CASES = [
    Case((1, 1, 1), trainer={"accumulate_grad_batches": 2}),
    Case((2, 1, 1), strategy={"data_parallel": "fsdp"}, trainer={"precision": "bf16-mixed"}),
    Case((1, 2, 2), strategy={"sequence_parallel": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.layout))
def test_no_value_is_read(case: Case, pool: RankPool) -> None:
    assert pool.run(readings, case.world_size, (case,)) == [[]] * case.world_size


def test_a_reading_is_found(pool: RankPool) -> None:
    (places,) = pool.run(readings, 1, (Case((1, 1, 1)), Reads))
    assert len(places) == 2 * STEPS  # two microbatches
    assert all("pipeline_loss" in place for place in places)
