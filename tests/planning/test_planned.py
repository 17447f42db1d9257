"""Plans against runs: parameters and collectives exactly, memory within 1 % or what MEMORY_WITHIN says, the bubble as its formula says."""

from collections import Counter
from dataclasses import replace

import pytest
from ranks_planned import Case, observed

from lightning_3d.mesh import ParallelDims
from lightning_3d.planning.estimate import Estimate, estimate
from lightning_3d.planning.gpus import GPUS
from lightning_3d.planning.parameters import parts

CASES = {
    "dp=2": Case(ParallelDims(dp=2)),
    "dp=2, one microbatch": Case(ParallelDims(dp=2), {"data_parallel": "fsdp"}, microbatches=1),
    "dp=2, recomputed": Case(ParallelDims(dp=2), {"data_parallel": "fsdp", "recompute": "full"}),
    "dp=2, one microbatch, recomputed": Case(ParallelDims(dp=2), {"data_parallel": "fsdp", "recompute": "full"}, microbatches=1),
    "tp=2": Case(ParallelDims(tp=2)),
    "pp=2, bf16": Case(ParallelDims(pp=2), precision="bf16-mixed", mask_documents=True),
    "pp=2, interleaved": Case(ParallelDims(pp=2), {"pp_engine": "interleaved_1f1b", "virtual_stages": 2}),
    "cp=2, ring": Case(ParallelDims(cp=2)),
    "dp=4, hsdp": Case(ParallelDims(dp=4, replicate=2), {"data_parallel": "hsdp"}),
    "dp=2 x tp=2, zero2": Case(
        ParallelDims(dp=2, tp=2),
        {"data_parallel": "zero2", "recompute": "selective"},
        module={"loss_chunks": 4, "z_loss_coefficient": 1e-4},
    ),
    "dp=2 x tp=2, fsdp": Case(ParallelDims(dp=2, tp=2), {"data_parallel": "fsdp", "recompute": "full", "sequence_parallel": True}),
    "dp=2 x pp=4, fsdp": Case(ParallelDims(dp=2, pp=4), {"data_parallel": "fsdp", "pp_engine": "afab"}),
    "dp=2 x tp=2 x pp=2": Case(
        ParallelDims(dp=2, tp=2, pp=2), {"sequence_parallel": True}, {"tie_word_embeddings": True, "attention_bias": True}
    ),
}


def planned(case: Case) -> Estimate:
    metrics = 2 if case.module.get("z_loss_coefficient") else 1
    return estimate(case.build(), replace(case.setting, num_metrics=metrics), GPUS["h100-80gb"])


# 3.8 %: on the first stage there are two copies of the weights' casts, in the plan one; why is not known, nor is the cause of the 3.3 %.
# Elsewhere 1 % at most.
MEMORY_WITHIN = {"pp=2, bf16": 0.045, "pp=2, interleaved": 0.04}
SLOW = ("dp=4, hsdp", "dp=2 x tp=2, zero2", "dp=2 x tp=2, fsdp", "dp=2 x pp=4, fsdp", "dp=2 x tp=2 x pp=2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in CASES.items()]
)
def test_a_run_is_as_planned(pool, name: str, case: Case) -> None:
    plan, setting, module = planned(case), case.setting, case.build()
    for rank, seen in enumerate(pool.run(observed, case.dims.world_size, (case,), timeout_s=240)):
        coord = case.dims.coord(rank)
        stage = plan.stages[coord.pp]
        own = [part for index in stage.parts for part in parts(module, setting, index, tp=coord.tp, dp=coord.dp)]
        assert seen["counts"] == (plan.numel, sum(part.local_numel for part in own))
        seen_sent, planned_sent = by_kind(seen["collectives"]), sent(stage.traffic)
        if coord.tp == 0:  # the plan is that of the rank that holds most: a vocabulary of an odd size leaves the last one a row less
            assert seen_sent == planned_sent
        else:
            assert {kind: count for kind, (count, _) in seen_sent.items()} == {kind: count for kind, (count, _) in planned_sent.items()}
            assert all(planned_sent[kind][1] * 0.998 <= nbytes <= planned_sent[kind][1] for kind, (_, nbytes) in seen_sent.items())
        assert seen["peak"] == pytest.approx(stage.peak.total, rel=MEMORY_WITHIN.get(name, 0.01))


def by_kind(collectives: dict[tuple[str, int], int]) -> dict[str, tuple[int, int]]:
    """Kind -> (how many, bytes of all)."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for (kind, size), count in collectives.items():
        counts[kind] += count
        nbytes[kind] += count * size
    return {kind: (counts[kind], nbytes[kind]) for kind in counts}


def sent(traffic) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for one in traffic:
        counts[one.kind] += one.count
        nbytes[one.kind] += one.nbytes
    return {kind: (counts[kind], nbytes[kind]) for kind in counts}


@pytest.mark.parametrize(("engine", "virtual", "pp", "microbatches"), [("1f1b", 1, 4, 8), ("afab", 1, 2, 6), ("interleaved_1f1b", 2, 2, 4)])
def test_the_bubble_is_the_schedules(engine: str, virtual: int, pp: int, microbatches: int) -> None:
    case = Case(ParallelDims(pp=pp), {"pp_engine": engine, "virtual_stages": virtual}, microbatches=microbatches)
    waits = (pp - 1) / virtual
    assert planned(case).bubble == pytest.approx(waits / (microbatches + waits))


def test_what_is_offloaded_takes_no_memory_of_the_device() -> None:
    """Nor do gradients once they are sharded; while microbatches come they are whole, and on the device."""
    here = Case(ParallelDims(dp=2, tp=2, pp=2), {"data_parallel": "fsdp"})
    there = replace(here, strategy=here.strategy | {"cpu_offload": True})
    for stage, other in zip(planned(here).stages, planned(there).stages, strict=True):
        for moment, offloaded in zip(stage.moments, other.moments, strict=True):
            in_schedule = moment.action is not None
            memory = replace(moment.memory, weights=0, optimizer=0, **({} if in_schedule else {"gradients": 0}))
            assert offloaded.memory == memory
        assert other.peak.gradients > 0
