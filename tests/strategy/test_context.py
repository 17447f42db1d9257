"""Ring, allgather and ulysses are attention over the whole sequence, forward and backward."""

import pytest
import torch
from ranks_context import differences, inputs, sharded_and_joined

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.attention_kernels import PLAIN, kernel_for
from lightning_3d.placement import head_tail
from lightning_3d.testing import RankPool


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_equals_full_attention(method: str, documents: bool, cp: int, pool: RankPool) -> None:
    for seen in pool.run(differences, cp, (method, documents, torch.float64)):
        assert max(seen["largest"]) < 1e-13
        # Forward cp - 1 blocks of keys and values; backward the same, and cp times the gradients of one.
        assert seen["sent"] == ([cp - 1, cp - 1, 2 * cp - 1] if method == "ring" else [0, 0, 0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.04)], ids=str)
def test_ring_in_other_dtypes(dtype: torch.dtype, tolerance: float, pool: RankPool) -> None:
    for seen in pool.run(differences, 2, ("ring", True, dtype)):
        assert max(seen["largest"]) < tolerance
        assert seen["dtypes"] == {dtype}


def test_which_tokens_a_rank_holds(pool: RankPool) -> None:
    held = pool.run(sharded_and_joined, 4)
    assert [places for places, _ in held] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert all(joined == list(range(16)) for _, joined in held)


def test_a_sequence_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"^sequence_length=18 is not divisible by 2 x cp = 4, as two chunks of it on each of cp=2 ranks"):
        head_tail(18, 2, 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_kernel_equals_the_fused_one(causal: bool, masked: bool) -> None:
    """What runs where a device has no fused kernel."""
    q, k, v, grad = (x.transpose(1, 2) for x in inputs(torch.float64))
    mask = torch.zeros(2, 1, 24, 24, dtype=torch.float64)
    mask[:, :, 3:, 2] = mask[:, :, 7] = -1e30
    options = (causal, mask if masked else None)
    fused = kernel_for(q, masked=masked)
    results = []
    for kernel in (fused, PLAIN):
        out, lse = kernel.forward(q, k, v, *options)
        of_all_blocks = lse.clamp(min=0)  # a query that sees nothing here sees something elsewhere
        results.append((out, lse, *kernel.backward(grad, q, out, of_all_blocks, k, v, *options)))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-13)
