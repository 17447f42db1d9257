"""bf16-mixed and bf16-true against a plain loop in one process.

Over dp and pp each microbatch is computed as in that loop, and what differs is the order in which float32 adds gradients up: over
microbatches and over ranks. A sum in bfloat16 anywhere would be off by 1e-3. Over tp products are partial sums in bfloat16, which are.
"""

import pytest
from ranks_bf16 import gradients, plain
from ranks_fit import Case

from lightning_3d.testing import RankPool

SUMS_IN_FLOAT32, ROUNDING = 1e-6, 1.5e-2
CASES = [
    ((1, 1, 1), {}, SUMS_IN_FLOAT32),
    ((2, 1, 1), {"data_parallel": "ddp"}, SUMS_IN_FLOAT32),
    ((2, 1, 1), {"data_parallel": "zero2"}, SUMS_IN_FLOAT32),
    ((2, 1, 2), {"data_parallel": "fsdp"}, SUMS_IN_FLOAT32),
    ((4, 1, 1), {"data_parallel": "hsdp", "dp_replicate": 2}, SUMS_IN_FLOAT32),
    ((2, 2, 1), {"data_parallel": "fsdp", "sequence_parallel": True}, ROUNDING),
    ((1, 2, 2), {}, ROUNDING),
]


def check(case: Case, precision: str, tolerance: float, pool: RankPool) -> None:
    """Each gradient's error relative to its norm."""
    expected = pool.run(plain, 1, (precision == "bf16-mixed",))[0]
    held: set[str] = set()
    for seen in pool.run(gradients, case.world_size, (case,)):
        held |= seen.keys()
        for name, gradient in seen.items():
            assert gradient.dtype == expected[name].dtype
            error = (gradient.double() - expected[name].double()).norm() / expected[name].double().norm()
            assert error <= tolerance, f"{name} is off by {error:.1e}"
    assert held == expected.keys()


@pytest.mark.parametrize(("layout", "strategy", "tolerance"), CASES, ids=str)
def test_mixed(layout: tuple[int, int, int], strategy: dict, tolerance: float, pool: RankPool) -> None:
    check(Case(layout, strategy=strategy, trainer={"precision": "bf16-mixed", "max_steps": 1}), "bf16-mixed", tolerance, pool)


@pytest.mark.parametrize(("layout", "strategy"), [((2, 1, 1), {"data_parallel": "fsdp"}), ((2, 1, 2), {}), ((1, 2, 1), {})], ids=str)
def test_true(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    check(Case(layout, strategy=strategy, trainer={"precision": "bf16-true", "max_steps": 1}), "bf16-true", ROUNDING, pool)
