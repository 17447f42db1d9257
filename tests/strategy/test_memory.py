"""What a step keeps in memory: activations as the schedule's list of actions says, and no gradients of the step before."""

import pytest
from ranks_fit import Case
from ranks_memory import gradients_alive, most_held

from lightning_3d.parallel.schedules import actions
from lightning_3d.parallel.timeline import most_held as expected
from lightning_3d.testing import RankPool

ENGINES = [("afab", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2), ("zero_bubble", 1), ("zbv", 2), ("dualpipe_v", 2)]


def case(engine: str, virtual: int, microbatches: int, layout: tuple[int, int, int] = (1, 1, 2), **strategy: str) -> Case:
    options = {"pp_engine": engine, "virtual_stages": virtual, "batch_accumulation_per_replica": microbatches}
    return Case(layout, strategy=options | strategy, data={"rows": 16 * layout[0]})


@pytest.mark.parametrize(("engine", "virtual"), ENGINES)
def test_activations_of_a_schedule(engine: str, virtual: int, pool: RankPool) -> None:
    for microbatches in (4, 16):
        held = pool.run(most_held, 2, (case(engine, virtual, microbatches),))
        assert held == [expected(row) for row in actions(engine, 2, virtual, microbatches)]
        if engine == "1f1b":
            assert held == [2, 1]  # of at most pp microbatches, however many there are
        if engine == "afab":
            assert held == [microbatches] * 2


@pytest.mark.parametrize("tested", [case("1f1b", 1, 2), case("zbv", 2, 2, (2, 1, 2), data_parallel="fsdp")], ids=["1f1b", "zbv-fsdp"])
def test_gradients_are_freed_before_the_next_schedule(tested: Case, pool: RankPool) -> None:
    for alive in pool.run(gradients_alive, tested.world_size, (tested,)):
        assert len(alive) >= 3 * 2
        assert max(alive) == 0
