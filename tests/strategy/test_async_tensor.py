"""Asynchronous tensor parallelism: what torch's pass finds in our graphs, the numbers of what it makes of them, and what is refused."""

from typing import Any

import pytest
import torch
from ranks_async import fused_fit
from ranks_compile import Compiled, fit
from ranks_refusals import Lengths, llama
from test_bad_input import trainer

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.async_tensor import check_async_tensor_parallel
from lightning_3d.testing import RankPool

FORWARD = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2, "products": 5}  # q, k, v of one gather, gate and up of the other
BACKWARD = {"fused_all_gather_matmul": 2, "products": 2, "reduce_scatter_tensor": 2}  # of sums of several products, which no pass takes
AGAIN = {"fused_all_gather_matmul": 4, "products": 7, "fused_matmul_reduce_scatter": 1, "reduce_scatter_tensor": 2}


VALIDATION = {"all_gather_into_tensor": 2, "fused_matmul_reduce_scatter": 2, "products": 0}  # of several sequences


def case(rows: int = 2, precision: str | None = None, **options: Any) -> Compiled:
    """Microbatches of so many rows."""
    asked = {"sequence_parallel": True, "async_tensor_parallel": True, "batch_accumulation_per_replica": 4 // rows}
    return Compiled((1, 2, 1), asked | options, precision)


def check_graphs(seen: dict[str, Any], backward: dict[str, int], validation: dict[str, int] = FORWARD) -> None:
    expected = {"forward": FORWARD, "backward": backward, "validation": validation}
    assert {kind for kind, _ in seen["fused"]} == expected.keys()
    for kind, counts in seen["fused"]:
        assert dict(counts) == expected[kind], kind


def check_numbers(ranks: list[dict[str, Any]], pool: RankPool) -> None:
    """Against one process that compiles nothing."""
    (expected,) = pool.run(fit, 1, (Compiled((1, 1, 1)), False))
    for seen in ranks:
        for what in ("losses", "norms", "val"):
            assert seen[what] == pytest.approx(expected[what], rel=0, abs=1e-12)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=1e-12, msg=lambda m, k=name: f"{k}: {m}")


def test_all_that_torch_can_is_fused(pool: RankPool) -> None:
    ranks = pool.run(fused_fit, 2, (case(),))
    for seen in ranks:
        check_graphs(seen, BACKWARD, VALIDATION)
    check_numbers(ranks, pool)


@pytest.mark.slow
def test_of_one_sequence_in_bf16(pool: RankPool) -> None:
    """Gathered in bfloat16: a cast between gather and products would keep them apart."""
    for seen in pool.run(fused_fit, 2, (case(1, "bf16-mixed"),)):
        check_graphs(seen, BACKWARD)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "backward"), [("none", BACKWARD), ("full", AGAIN)])
def test_of_one_sequence(recompute: str, backward: dict[str, int], pool: RankPool) -> None:
    ranks = pool.run(fused_fit, 2, (case(1, recompute=recompute),))
    for seen in ranks:
        check_graphs(seen, backward)
    check_numbers(ranks, pool)


@pytest.mark.slow
def test_from_inductor(pool: RankPool) -> None:
    """Its own kernels for all but the fused operations."""
    check_numbers(pool.run(fused_fit, 2, (case(), True)), pool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 1}, "tp=1: set tp to 2 or more"),
        ({"sequence_parallel": False}, "sequence_parallel=False: set sequence_parallel to true"),
        ({"mode": False}, "compile=False: set compile to true"),
        ({"mode": "aot_eager"}, "compile=aot_eager: set compile to true"),
        ({"device": torch.device("cpu")}, "a device of type cpu: run on CUDA devices"),
    ],
    ids=str,
)
def test_what_it_needs(options: dict[str, Any], message: str) -> None:
    asked = {"tp": 2, "sequence_parallel": True, "mode": True, "device": torch.device("cuda")}
    check_async_tensor_parallel(**asked)
    with pytest.raises(ConfigError, match=f"^async_tensor_parallel=True cannot be with {message}, or leave async_tensor_parallel out$"):
        check_async_tensor_parallel(**asked | options)


def test_refused_before_processes_start() -> None:
    with pytest.raises(ConfigError, match=r"^async_tensor_parallel=True cannot be with a device of type cpu: "):
        trainer(2, tp=2, sequence_parallel=True, compile=True, async_tensor_parallel=True).fit(llama(), datamodule=Lengths(16))
