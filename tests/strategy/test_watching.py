"""LayerStats, Stragglers and Memory on ranks: the numbers of one process, and the rank that was made slow."""

from functools import partial

import pytest
from ranks_fit import Case, fit
from ranks_watching import Slow, fit_and_listen

from lightning_3d.callbacks import LayerStats, Memory, Stragglers
from lightning_3d.callbacks.stragglers import slowest_of
from lightning_3d.testing import RankPool

EACH_STEP = {"log_every_n_steps": 1}
LAYERS = ("h.0", "h.1", "h.2", "h.3", "wte", "wpe", "ln_f")


def layer_stats(pool: RankPool, case: Case) -> list[dict[str, float]]:
    ranks = pool.run(fit, case.world_size, (case,))
    return [{name: value for name, value in rank["metrics"].items() if name.count("/") == 2} for rank in ranks]


def test_layer_stats_are_those_of_one_process(pool: RankPool) -> None:
    options = {"trainer": EACH_STEP, "callbacks": (partial(LayerStats, 1),)}
    (plain,) = pool.run(fit, 1, (Case(None, **options),))
    kinds = {(kind, stat) for kind in ("weights", "gradients", "activations") for stat in ("norm", "max", "zeros")}
    expected = {name: value for name, value in plain["metrics"].items() if name.count("/") == 2}
    blocks = [layer for layer in LAYERS if "." in layer]
    assert set(expected) == {f"{kind}/{stat}/{at}" for kind, stat in kinds for at in (blocks if kind == "activations" else LAYERS)}
    for layer in LAYERS:  # by hand
        gradients = [g for name, g in plain["gradients"][-1].items() if name.startswith(f"{layer}.")]
        assert expected[f"gradients/norm/{layer}"] == pytest.approx(sum(float(g.square().sum()) for g in gradients) ** 0.5, rel=1e-12)
        assert expected[f"gradients/max/{layer}"] == max(float(g.abs().max()) for g in gradients)
        share = sum(int((g == 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)
        assert expected[f"gradients/zeros/{layer}"] == pytest.approx(share, abs=1e-15)
    for layout, strategy in (
        ((2, 2, 1), {"data_parallel": "fsdp"}),
        ((1, 2, 2), {"sequence_parallel": True}),
        ((1, 2, 2), {}),
        ((2, 1, 2), {}),
    ):
        for found in layer_stats(pool, Case(layout, strategy=strategy, **options)):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                # The gradient of a key's bias is 0 but for rounding, which makes some of its 8 elements exactly 0: 8 of 736 in a block.
                tolerance = 0.011 if name.startswith("gradients/zeros/h.") else 1e-12
                assert value == pytest.approx(expected[name], rel=1e-10, abs=tolerance), name


def test_layer_stats_only_when_due(pool: RankPool) -> None:
    case = Case((1, 1, 2), trainer=EACH_STEP, callbacks=(partial(LayerStats, 100),))
    assert layer_stats(pool, case) == [{}, {}]


def test_the_slow_rank_is_named(pool: RankPool) -> None:
    callbacks = (partial(Slow, 2, 0.2), partial(Stragglers, 1.5), Memory)
    ranks = pool.run(fit_and_listen, 4, (Case((2, 1, 2), trainer={"log_every_n_steps": 4}, callbacks=callbacks),))
    metrics, heard = ranks[0]
    assert all(other == metrics for other, _ in ranks)
    assert metrics["forward_ms/slowest_rank"] == 2
    assert metrics["forward_ms/max"] > 400, "two microbatches of 200 ms"
    assert metrics["forward_ms/stage_1"] > 200
    assert metrics["forward_ms/min"] < 200
    assert any(message.startswith("rank 2 (pp=1, dp=0) is slow: ") for message in heard)
    assert 0.1 < metrics["memory_gib"] < 50
    assert metrics["memory_rank"] in range(4)


def test_ranks_are_compared_with_those_that_do_the_same() -> None:
    first, last = (True, False), (False, True)
    assert slowest_of([1.0, 1.0, 5.0, 5.0], [first, first, last, last]) == (0, 1.0)
    assert slowest_of([1.0, 3.0, 5.0, 5.0], [first, first, last, last]) == (1, 3.0)
    assert slowest_of([1.0, 5.0], [first, last]) == (1, 5.0)  # nobody else holds them
