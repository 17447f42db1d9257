"""FSDP asks for the next block's parameters before a block computes, in the forward and in the backward, and for no more than it needs."""

from itertools import takewhile

import pytest
from ranks_prefetch import BLOCKS, calls
from scenario import Scenario

from lightning_3d.parallel.recorder import Call
from lightning_3d.testing import RankPool


def gathered_before(what: str, seen: list[Call]) -> int:
    """How many gathers of parameters were asked for before something began."""
    assert any(call.op == what for call in seen)
    return sum(call.op == "all-gather" for call in takewhile(lambda call: call.op != what, seen))


@pytest.mark.parametrize(
    "s",
    [Scenario(dp=2, mode="fsdp"), Scenario(dp=2, mode="fsdp", recompute="full"), Scenario(dp=4, mode="hsdp")],
    ids=lambda s: f"{s.mode}-{s.recompute}",
)
def test_the_next_block_is_gathered_while_one_computes(s: Scenario, pool: RankPool) -> None:
    """The first gather is of what is beside the blocks. Of the last block there is none after it."""
    for seen in pool.run(calls, s.world_size, (s, 1)):
        for block in range(BLOCKS):
            assert gathered_before(f"forward {block}", seen) == 1 + min(block + 2, BLOCKS)
            assert gathered_before(f"backward {block}", seen) == 1 + BLOCKS + min(BLOCKS - block + 1, BLOCKS)
        gathers = [call.nbytes for call in seen if call.op == "all-gather"]
        assert len(gathers) == 1 + 2 * BLOCKS
        assert len(set(gathers[1:])) == 1  # each block once forward and once backward


def test_with_microbatches_nothing_is_gathered_in_vain(pool: RankPool) -> None:
    """A block is whole from each backward to the end of the next forward."""
    for seen in pool.run(calls, 2, (Scenario(dp=2, mode="fsdp"), 4)):
        assert sum(call.op == "all-gather" for call in seen) == 1 + BLOCKS * (1 + 4)


def test_what_stays_whole_is_not_gathered_ahead(pool: RankPool) -> None:
    """Under zero2 each block is gathered once a step, when its turn comes."""
    for seen in pool.run(calls, 2, (Scenario(dp=2, mode="zero2"), 2)):
        assert [gathered_before(f"forward {block}", seen) for block in range(BLOCKS)] == [2 + block for block in range(BLOCKS)]
        assert sum(call.op == "all-gather" for call in seen) == 1 + BLOCKS
