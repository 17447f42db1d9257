"""Trainer(precision=...) changes dtypes in every layout, and losses stay near those of float32."""

import pytest
from ranks_fit import Case
from ranks_precision import fit

from lightning_3d.testing import RankPool

CLIP = {"gradient_clip_val": 0.5, "max_steps": 6}
LAYOUTS = [
    ((1, 2, 2), {}),
    ((1, 1, 2), {}),
    ((2, 1, 2), {"data_parallel": "fsdp"}),
    ((2, 2, 1), {"data_parallel": "zero2", "sequence_parallel": True}),
]
EXPECTED = {
    "32-true": {"parameter": "float32", "gradient": "float32", "product": "float32", "exchanged": "float32"},
    # Autocast leaves the embedding's output and the sums of the residual stream in float32.
    "bf16-mixed": {"parameter": "float32", "gradient": "float32", "product": "bfloat16", "exchanged": "float32"},
    "bf16-true": {"parameter": "bfloat16", "gradient": "bfloat16", "product": "bfloat16", "exchanged": "bfloat16"},
}


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> list[float]:
    return pool.run(fit, 1, (Case(None, trainer=CLIP),))[0][1]


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=str)
@pytest.mark.parametrize("precision", EXPECTED)
def test_precision(precision: str, layout: tuple[int, int, int], strategy: dict, plain: list[float], pool: RankPool) -> None:
    """AdamW is the fused one, which Lightning's own plugin refuses to clip."""
    case = Case(layout, strategy=strategy, trainer={**CLIP, "precision": precision})
    expected = EXPECTED[precision]
    ranks = pool.run(fit, case.world_size, (case,))
    for dtypes, losses, norm in ranks:
        assert all(dtypes[what] == {expected[what]} for what in ("parameter", "gradient", "product"))
        assert dtypes["loss"] == {"float32"}
        assert dtypes.get("microbatch loss", {"float32"}) == {"float32"}
        assert (dtypes.keys() >= {"sent"}) or (dtypes.keys() >= {"received"}) or layout[2] == 1
        assert dtypes.get("sent", set()) | dtypes.get("received", set()) <= {expected["exchanged"]}
        assert losses == ranks[0][1] == pytest.approx(plain, abs=1e-5 if precision == "32-true" else 0.05)
        assert losses[-1] < losses[0] - 0.5
        assert norm == ranks[0][2] > 0.5
