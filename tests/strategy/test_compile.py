"""Compiled blocks compute what they compute uncompiled, from one graph for all blocks.

``aot_eager`` traces, splits and runs the graphs as inductor's are, without the time that inductor takes for its kernels.
"""

from typing import Any

import pytest
import torch
from ranks_compile import Compiled, fit
from ranks_gpt import Data
from ranks_refusals import Lengths, Plain, llama
from test_bad_input import trainer

from lightning_3d.errors import ConfigError
from lightning_3d.testing import RankPool

CASES = {  # and the number of graphs: for training and for validation, of each class of blocks, with and without a mask made before
    Compiled((1, 1, 1), documents=True): 4,
    Compiled((2, 1, 1), {"data_parallel": "fsdp", "recompute": "full"}): 2,
    Compiled((1, 2, 1), {"sequence_parallel": True, "recompute": "selective"}): 2,
    Compiled((2, 2, 1), {"data_parallel": "fsdp"}): 2,
    Compiled((2, 1, 2), {"data_parallel": "zero2", "recompute": 2}): 4,
}


def check(case: Compiled, mode: Any, pool: RankPool, *, breaks: bool = False) -> list[dict[str, Any]]:
    """Numbers against those of the same layout, not compiled; and whether graphs break."""
    plain, ranks = (pool.run(fit, case.world_size, (case, each)) for each in (False, mode))
    for seen, expected in zip(ranks, plain, strict=True):
        for what in ("losses", "norms", "val"):
            assert seen[what] == pytest.approx(expected[what], rel=0, abs=1e-12)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=1e-12, msg=lambda m, k=name: f"{k}: {m}")
        assert (expected["graphs"], bool(seen["breaks"])) == (0, breaks)
    return ranks


@pytest.mark.parametrize(("case", "graphs"), CASES.items(), ids=str)
def test_the_same_numbers(case: Compiled, graphs: int, pool: RankPool) -> None:
    assert [seen["graphs"] for seen in check(case, "aot_eager", pool)] == [graphs] * case.world_size


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_the_same_numbers_with_cp(method: str, pool: RankPool) -> None:
    """What attention sends and receives is part of no graph."""
    check(Compiled((1, 1, 1), {"cp": 2, "cp_method": method}), "aot_eager", pool, breaks=True)


@pytest.mark.slow
def test_the_same_numbers_from_inductor(pool: RankPool) -> None:
    check(Compiled((1, 1, 1)), True, pool)


def test_a_second_length_compiles_once_more(pool: RankPool) -> None:
    """For any other length: torch leaves the size open then, and does so in validation from the start."""
    case = Compiled((1, 1, 1), sequences=(16, 16, 12, 14, 10))
    assert check(case, "aot_eager", pool)[0]["graphs"] == 3


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"^compile='inductr': choose true, false, or one of torch's backends \["):
        trainer(1, compile="inductr").fit(llama(), datamodule=Lengths(16))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"^compile=True: on CPUs it needs a C\+\+ compiler, and no-such-compiler is not there"):
        trainer(1, compile=True).fit(llama(), datamodule=Lengths(16))


def test_a_module_without_stages() -> None:
    with pytest.raises(ConfigError, match=r"^compile=True has no effect on Plain, which is no PipelineMixin: leave it out"):
        trainer(1, compile=True).fit(Plain(), datamodule=Data())
