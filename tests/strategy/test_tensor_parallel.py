"""Tensor-parallel collectives, losses and modules against the computation that is not cut; more ranks than parts included."""

import pytest
import torch
from ranks_tensor import B, D, S, collectives, indivisible_sequence, losses, pieces, refused_rows, sent_under_autocast

from lightning_3d.testing import RankPool


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_enter_and_leave(sequence_parallel: bool, tp: int, pool: RankPool) -> None:
    for results in pool.run(collectives, tp, (sequence_parallel,)):
        for what, mine, expected in results:
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-14, msg=what)


def test_autocast_halves_what_is_sent(pool: RankPool) -> None:
    """The products behind would take bfloat16 anyway."""
    for calls in pool.run(sent_under_autocast, 2):
        assert [(call.op, call.nbytes) for call in calls] == [("all-gather", 2 * B * S * D), ("reduce-scatter", 2 * B * S * D)]


def test_sequence_that_does_not_divide(pool: RankPool) -> None:
    assert (
        pool.run(indivisible_sequence, 2)
        == ["sequence_length=3 is not divisible by tp=2, as sequence_parallel: true needs: change one"] * 2
    )


# Of 4 ranks with 13 ids the last holds 1, with 5 ids none, with 3 ids three hold one each
@pytest.mark.parametrize(("vocab", "tp"), [(13, 2), (13, 4), (5, 4), (3, 4), (1, 2)])
def test_vocabulary_parallel_losses(vocab: int, tp: int, pool: RankPool) -> None:
    for results in pool.run(losses, tp, (vocab, torch.float64)):
        for what, (mine, expected) in results.items():
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13, msg=what)


def test_losses_of_bfloat16_logits_are_float32(pool: RankPool) -> None:
    for results in pool.run(losses, 2, (13, torch.bfloat16)):
        assert results["nll"][0].dtype == torch.float32
        assert results["gradient"][0].dtype == torch.bfloat16
        for what, (mine, expected) in results.items():
            torch.testing.assert_close(mine, expected, msg=what)


@pytest.mark.parametrize(("vocab", "tp"), [(13, 2), (5, 4), (3, 4)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_kind_of_row(sequence_parallel: bool, vocab: int, tp: int, pool: RankPool) -> None:
    """Whole embeddings and norms outside, a norm of the heads inside, biases of both kinds."""
    for results in pool.run(pieces, tp, (vocab, sequence_parallel)):
        for what, (mine, expected) in results.items():
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13, msg=lambda m, what=what: f"{what}: {m}")


def test_rows_that_make_no_sense(pool: RankPool) -> None:
    first, *_ = pool.run(refused_rows, 2)
    assert "accepted" not in first
    assert first[0].startswith("tensor-parallel plan: Linear in region 'leave' with shard_dim=0: 'leave' goes with shard_dim=1")
    assert first[4] == "padding_idx=0 of an embedding that is cut over tp is not supported: leave it out"
    assert first[6] == "tp=2: no row of the tensor-parallel plan matches 'only' (Linear): add one"
