"""Every layout computes what one process computes: losses, unclipped gradients, norms, and weights after clipped steps, in float64.

All 20 layouts (dp, tp, pp) with product 1, 2, 4 and 8 run. Over them, sequence parallelism, schedule, data-parallel mode, accumulation,
tied embeddings, optimizer and chunks of the loss are chosen pairwise: every pair of two options' values that can occur together does.
`make test-slow` runs the full product, with the loss at once.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import all_cases, pairwise
from plain_llama import train
from scenario import CLIP, LEARNING_RATE, Scenario, global_batches, run

from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.parallel.schedules import ENGINES
from lightning_3d.seeding import materialise
from lightning_3d.testing import RankPool

GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-12, 1e-10
LAYOUTS = [(d, t, p) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if d * t * p in (1, 2, 4, 8)]
OPTIONS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "sequence_parallel": [False, True],
    "engine": list(ENGINES),
    "mode": ["ddp", "zero2", "fsdp", "hsdp"],
    "accumulate": [1, 2],
    "tied": [False, True],
    "optimizer": ["sgd", "adamw"],
    "loss_chunks": [1, 5],  # of 16 or 32 tokens: uneven
}


def allowed(case: dict[str, Any]) -> bool:
    """Combinations that differ from another one; hsdp needs two copies of two shards."""
    dp, tp, pp = case["layout"]
    if (tp == 1 and case["sequence_parallel"]) or (pp == 1 and case["engine"] != "1f1b") or (dp == 1 and case["mode"] != "ddp"):
        return False
    return case["mode"] != "hsdp" or dp >= 4


def scenario(case: dict[str, Any]) -> Scenario:
    dp, tp, pp = case["layout"]
    rest = {key: value for key, value in case.items() if key != "layout"}
    return Scenario(dp, tp, pp, virtual=1 if case["engine"] in ("afab", "1f1b") or pp == 1 else 2, **rest)


def runnable(s: Scenario) -> bool:
    """The model has 9 layers at most."""
    return s.stages <= 8


def quick(case: dict[str, Any]) -> bool:
    """The three first schedules meet all layouts; the others each kind of them."""
    layouts = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 4)]
    return case["engine"] in list(ENGINES)[:3] or case["layout"] in layouts


def name(s: Scenario) -> str:
    parts = [
        f"dp{s.dp}tp{s.tp}pp{s.pp}",
        s.engine,
        s.mode,
        s.optimizer,
        f"acc{s.accumulate}",
        *["sp"] * s.sequence_parallel,
        *["tied"] * s.tied,
        *["chunks"] * (s.loss_chunks > 1),
        *["offload"] * s.cpu_offload,
    ]
    return "-".join(parts)


OFFLOADED = [
    Scenario(2, 2, 1, sequence_parallel=True, mode="fsdp", accumulate=2, optimizer="adamw"),
    Scenario(2, 1, 2, mode="zero2", tied=True),
    Scenario(4, 2, 1, mode="hsdp", recompute="full"),
    Scenario(2, 2, 2, sequence_parallel=True, mode="fsdp", tied=True, engine="zbv", virtual=2, optimizer="adamw"),
]
ALL = [s for case in all_cases(OPTIONS | {"loss_chunks": [1]}, allowed) if runnable(s := scenario(case))]
PAIRWISE = [s for case in pairwise(OPTIONS, lambda c: allowed(c) and runnable(scenario(c)) and quick(c)) if (s := scenario(case))]


def start_weights(s: Scenario) -> dict[str, torch.Tensor]:
    """The seed's weights, drawn for the whole model in this process."""
    config = LlamaConfig(**s.model)
    with torch.device("meta"):
        whole = LlamaStage(config, range(config.num_hidden_layers), first=True, last=True)
    materialise(whole, 42, torch.device("cpu"))
    return {key: weight.detach() for key, weight in whole.named_parameters()}


@cache
def reference(s: Scenario) -> dict[str, Any]:
    """The plain loop; it depends on the sizes of batch and model only."""
    torch.set_default_dtype(torch.float64)
    try:
        weights = start_weights(s)
        model = s.model | {"z_loss": 1e-3}
        return {"start": weights} | train(weights, model, global_batches(s), s.optimizer, s.accumulate, LEARNING_RATE, CLIP)
    finally:
        torch.set_default_dtype(torch.float32)


def check(s: Scenario, ranks: list[dict[str, Any]]) -> None:
    sizes = {"engine": s.engine if s.engine == "dualpipe_v" and s.world_size == 8 else "1f1b"}  # it takes more sequences
    plain = reference(replace(s, sequence_parallel=False, mode="ddp", loss_chunks=1, recompute="none", cpu_offload=False, **sizes))
    held: set[str] = set()
    for rank, seen in enumerate(ranks):
        assert (seen["losses"], seen["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]), f"rank {rank} sees other numbers"
        held |= seen["weights"].keys()
        for key, weight in seen["start"].items():
            assert torch.equal(weight, plain["start"][key]), f"{key} starts otherwise on rank {rank}"
        for key, gradient in seen["gradients"].items():
            torch.testing.assert_close(
                gradient, plain["gradients"][key], rtol=0, atol=GRADIENT_TOLERANCE, msg=lambda m, k=key: f"gradient of {k}: {m}"
            )
        for key, weight in seen["weights"].items():
            torch.testing.assert_close(
                weight, plain["weights"][key], rtol=0, atol=WEIGHT_TOLERANCE, msg=lambda m, k=key: f"weight {k}: {m}"
            )
    assert held == plain["weights"].keys()
    assert ranks[0]["losses"] == pytest.approx(plain["losses"], rel=0, abs=1e-12)
    assert ranks[0]["norms"] == pytest.approx(plain["norms"], rel=0, abs=1e-12)
    assert min(plain["norms"]) > CLIP  # else clipping is not under test


@pytest.mark.parametrize("s", sorted(PAIRWISE, key=lambda s: s.world_size), ids=name)
def test_layout_equals_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))


@pytest.mark.slow
@pytest.mark.parametrize("s", sorted(set(ALL) - set(PAIRWISE), key=lambda s: s.world_size), ids=name)
def test_every_layout_equals_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))


@pytest.mark.parametrize("s", [replace(s, cpu_offload=True) for s in OFFLOADED], ids=name)
def test_offloaded_layouts_equal_one_process(s: Scenario, pool: RankPool) -> None:
    check(s, pool.run(run, s.world_size, (s,)))


def test_a_schedule_from_a_file(pool: RankPool, tmp_path: Path) -> None:
    """One that no engine has: two stages that follow each other on each rank, rank 0 the inner ones, some backwards in halves."""
    path = tmp_path / "mine.csv"
    path.write_text("1F0,2F0,1F1,2F1,2I0,1B0,2W0,2B1,1I1,1W1\n0F0,0F1,3F0,3B0,3F1,3B1,0I0,0W0,0B1\n")
    s = Scenario(pp=2, engine=str(path), virtual=2, tied=True)
    check(s, pool.run(run, s.world_size, (s,)))


def test_the_selection_covers_all_layouts() -> None:
    assert {(s.dp, s.tp, s.pp) for s in PAIRWISE} == set(LAYOUTS)
