"""How often, over which axis and how much ranks send in a step."""

from collections import Counter
from typing import Any

import pytest
from ranks_recorder import each_once, step
from scenario import Scenario

from lightning_3d.parallel.recorder import Call
from lightning_3d.testing import RankPool

SMALL = 64  # bytes: sizes, counts and the norm


def large(seen: dict[str, Any]) -> dict[tuple[str, str], int]:
    return Counter((call.op, call.axis) for call in seen["calls"] if call.nbytes > SMALL)


def of(seen: dict[str, Any], op: str, axis: str) -> list[int]:
    return [call.nbytes for call in seen["calls"] if (call.op, call.axis) == (op, axis) and call.nbytes > SMALL]


def test_every_kind_of_call_is_seen(pool: RankPool) -> None:
    for calls in pool.run(each_once, 2):
        assert [call._replace(axis="") for call in calls[:8]] == [
            Call("all-reduce", "", 16),
            Call("all-gather", "", 32),
            Call("reduce-scatter", "", 32),
            Call("all-gather", "", 32),
            Call("broadcast", "", 16),
            Call("all-to-all", "", 16),
            Call("all-reduce", "", 16),
            Call("all-gather", "", 32),
        ]
        assert {call.axis for call in calls[:8]} == {"tp"}
        assert sorted((call.op, call.nbytes) for call in calls[8:]) == [("receive", 16), ("send", 16)]


def test_ddp_reduces_once_in_one_bucket(pool: RankPool) -> None:
    for seen in pool.run(step, 2, (Scenario(dp=2), {"batch_accumulation_per_replica": 4})):
        assert large(seen) == {("all-reduce", "dp"): 1}
        assert of(seen, "all-reduce", "dp") == [seen["nbytes"]]
        assert "all-reduce     dp " in seen["text"]


@pytest.mark.parametrize(
    "s",
    [
        Scenario(dp=2, mode="fsdp"),
        Scenario(dp=2, mode="zero2"),
        Scenario(dp=2, pp=2, mode="fsdp"),
        Scenario(dp=2, pp=2, mode="fsdp", engine="zbv", virtual=2),
        Scenario(dp=2, pp=2, mode="fsdp", engine="interleaved_1f1b", virtual=4),  # torch alone would keep but three stages whole
        Scenario(dp=4, mode="hsdp"),
    ],
    ids=lambda s: f"pp{s.pp}-{s.mode}-{s.engine}",
)
def test_sharded_gradients_are_reduced_once_a_step(s: Scenario, pool: RankPool) -> None:
    """Whatever the number of microbatches; under pp and zero2 parameters are gathered once, too."""
    seen = {m: pool.run(step, s.world_size, (s, {"batch_accumulation_per_replica": m})) for m in (2, 4)}
    for few, many in zip(seen[2], seen[4], strict=True):
        axis, units = "dp_shard" if s.mode == "hsdp" else "dp", few["units"]
        for each in (few, many):
            assert len(of(each, "reduce-scatter", axis)) == units
            if s.mode == "hsdp":
                assert len(of(each, "all-reduce", "dp_replicate")) == units
            if s.pp > 1 or s.mode == "zero2":
                assert len(of(each, "all-gather", axis)) == units
        assert sum(of(few, "reduce-scatter", axis)) == sum(of(many, "reduce-scatter", axis))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_communicates_at_two_places_of_a_half_layer(sequence_parallel: bool, pool: RankPool) -> None:
    """And at the embedding, the head and the loss. Two ranks on CPUs add up what they gather."""
    s = Scenario(tp=2, sequence_parallel=sequence_parallel)
    for seen in pool.run(step, 2, (s, {"batch_accumulation_per_replica": 4})):
        places = 2 * seen["layers"] + 1  # attention, feed-forward; the embedding leaves, the head enters
        counts = large(seen)
        if sequence_parallel:
            assert counts[("all-gather", "tp")] == 4 * (2 * places + 1)
            assert counts[("reduce-scatter", "tp")] == 4 * 2 * places
            assert counts[("all-reduce", "tp")] == 1  # gradients of what is whole on each rank
        else:
            assert counts[("all-gather", "tp")] == 4 * (2 * places + 1)
            assert ("reduce-scatter", "tp") not in counts


def test_pp_sends_each_microbatch_once_over_each_border(pool: RankPool) -> None:
    first, last = pool.run(step, 2, (Scenario(pp=2), {"batch_accumulation_per_replica": 4}))
    for seen in (first, last):
        assert len(of(seen, "send", "pp")) == len(of(seen, "receive", "pp")) == 4
    v_first, v_last = pool.run(step, 2, (Scenario(pp=2, engine="zbv", virtual=2), {"batch_accumulation_per_replica": 4}))
    for seen in (v_first, v_last):  # 0 -> 1, and 2 -> 3; from stage 1 to stage 2 nothing is sent
        assert len(of(seen, "send", "pp")) == len(of(seen, "receive", "pp")) == 8


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_sends_each_block_to_all_but_its_owner(cp: int, pool: RankPool) -> None:
    """Forward cp - 1 blocks of keys and values, backward as many and cp of their gradients; two tensors in a block."""
    s = Scenario(cp=cp)
    for seen in pool.run(step, cp, (s, {"batch_accumulation_per_replica": 2})):
        sent = of(seen, "send", "cp")
        assert len(sent) == len(of(seen, "receive", "cp")) == 2 * seen["layers"] * (2 * (cp - 1) + cp)
        heads, width = s.model["num_key_value_heads"], s.model["hidden_size"] // s.model["num_attention_heads"]
        rows = s.rows // 2
        assert set(sent) == {2 * 4 * rows * 16 // cp * heads * width}
