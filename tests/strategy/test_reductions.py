"""What is counted, averaged, sampled and seeded over which ranks; and batches that ranks of one replica must share."""

import pytest
from ranks_fit import Case
from ranks_reductions import Batches, Counting, OtherMetrics, counted, guarded, reductions, refused, sampled, worker_seeds

from lightning_3d.testing import RankPool


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_torchmetrics_count_each_sample_once(layout: tuple[int, int, int], pool: RankPool) -> None:
    (plain,) = pool.run(counted, 1, (Case(None, Counting),))
    assert plain["samples"] == 24
    case = Case(layout, Counting)
    assert pool.run(counted, case.world_size, (case,)) == [pytest.approx(plain)] * case.world_size


def test_ranks_of_cp_count_each_sample_once(pool: RankPool) -> None:
    """Each of them holds the whole batch when metrics are updated."""
    case = Case((1, 1, 1), Counting, strategy={"cp": 2}, data={"val_length": 8})
    assert [seen["samples"] for seen in pool.run(counted, 2, (case,))] == [24, 24]


def test_reductions_with_cp(pool: RankPool) -> None:
    """Ranks 0 to 3 are (dp, cp) = (0, 0), (0, 1), (1, 0), (1, 1); a sum would count the same number twice over cp, a mean does not."""
    ranks = pool.run(reductions, 4, (Case((2, 1, 1), strategy={"cp": 2}),))
    assert [seen["mean"] for seen in ranks] == [1.5] * 4
    assert [seen["sum"] for seen in ranks] == [2, 4, 2, 4]
    assert [seen["sampler"] for seen in ranks] == [{"num_replicas": 2, "rank": dp} for dp in (0, 0, 1, 1)]


def test_reductions(pool: RankPool) -> None:
    """Ranks 0 to 3 are (pp, dp) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    ranks = pool.run(reductions, 4, (Case((2, 1, 2)),))
    assert [seen["mean"] for seen in ranks] == [0.5, 0.5, 2.5, 2.5]
    assert [seen["sum"] for seen in ranks] == [1, 1, 5, 5]
    assert [seen["sampler"] for seen in ranks] == [{"num_replicas": 2, "rank": dp} for dp in (0, 1, 0, 1)]
    for seen in ranks:
        assert seen["world"] == 6
        assert seen["text"] == "as it was"
        assert seen["all"] == [True, False, False]
        assert seen["any"] == [True, False, True]
        assert seen["broadcast"] == 3


@pytest.mark.parametrize(
    ("layout", "strategy"), [((1, 1, 1), {}), ((1, 1, 2), {}), ((1, 2, 2), {}), ((2, 1, 2), {"data_parallel": "fsdp"})], ids=str
)
def test_parameter_counts(layout: tuple[int, int, int], strategy: dict, pool: RankPool) -> None:
    """A block has 2 x 16 for norms, 4 x 72 for attention, 216 + 200 for the MLP; wte 104, wpe 96, ln_f 16. Tied ones count once."""
    case = Case(layout, strategy=strategy)
    counts = [seen["counts"] for seen in pool.run(reductions, case.world_size, (case,))]
    assert [total for total, _ in counts] == [4 * 736 + 104 + 96 + 16] * case.world_size
    first, last = counts[0][1], counts[-1][1]
    whole_norms = 2 * (32 + 8 + 8)  # of two blocks: norms, and biases of row-cut layers
    expected = {
        (1, 1, 1): (3160, 3160),
        (1, 1, 2): (2 * 736 + 104 + 96, 2 * 736 + 104 + 16),
        (1, 2, 2): ((2 * 736 - whole_norms) // 2 + whole_norms + 7 * 8 + 6 * 8, (2 * 736 - whole_norms) // 2 + whole_norms + 6 * 8 + 16),
        (2, 1, 2): (736 + 7 * 8 + 6 * 8, 736 + 6 * 8 + 8),
    }
    assert (first, last) == expected[layout]


def test_lightnings_sampler_follows_dp(pool: RankPool) -> None:
    case = Case((2, 1, 2), trainer={"use_distributed_sampler": True})
    first, second, first_again, second_again = pool.run(sampled, 4, (case,))
    assert first == first_again
    assert second == second_again
    assert sorted(first + second) == list(range(32))


def test_workers_are_seeded_by_dp_coord(pool: RankPool) -> None:
    """Else ranks of one replica would transform the same samples differently."""
    first, second, first_again, second_again = pool.run(worker_seeds, 4, (Case((2, 1, 2)),))
    assert first == first_again
    assert second == second_again
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1)], ids=str)
def test_guard(layout: tuple[int, int, int], pool: RankPool) -> None:
    first, second = pool.run(refused, 2, (Case(layout), Batches([1])))
    assert first == second
    assert first.startswith(
        "ranks 0 and 1 belong to one model replica but got different batches (batch 0): make the data depend on the dp coord"
    )


def test_guard_names_the_ranks_of_the_replica(pool: RankPool) -> None:
    for message in pool.run(refused, 4, (Case((2, 1, 2)), Batches([3], after=2))):
        assert message.startswith("ranks 1 and 3 belong to one model replica but got different batches (batch 2)")


def test_guard_looks_now_and_then(pool: RankPool) -> None:
    """At batches 0, 1, 2, 100, 200 ...: a checksum of each would cost time. Replicas may differ."""
    for number in (2, 100, 200):
        assert all(f"(batch {number})" in message for message in pool.run(guarded, 2, (2, number)))
    assert pool.run(guarded, 2, (2, 50)) == ["accepted"] * 2
    assert pool.run(guarded, 2, (1, 0)) == ["accepted"] * 2


def test_guard_with_cp(pool: RankPool) -> None:
    """Whole batches must be the same on all ranks of cp; parts of sequences are each rank's own."""
    for message in pool.run(guarded, 2, (1, 0, 2)):
        assert message.startswith("ranks 0 and 1 belong to one model replica but got different batches (batch 0)")
    assert pool.run(guarded, 2, (1, 0, 2, True)) == ["accepted"] * 2


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_training_batch_that_does_not_split(layout: tuple[int, int, int], pool: RankPool) -> None:
    case = Case(layout, strategy={"batch_accumulation_per_replica": 2})
    for message in pool.run(refused, case.world_size, (case, Batches([], rows=5))):
        assert message.startswith(
            "batch_accumulation_per_replica=2 does not divide the batch of 5 sequences (microbatches of [3, 2]): make the batch"
        )


def test_metrics_that_change_their_names(pool: RankPool) -> None:
    (message,) = pool.run(refused, 1, (Case((1, 1, 1), OtherMetrics), Batches([], after=1)))
    assert message == "pipeline_loss() returned metrics ['of step 1'], but ['of step 0'] before: return the same ones every time"
