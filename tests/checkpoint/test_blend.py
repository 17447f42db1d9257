"""A blend with stages, read by real ranks: the samples of the global batch are the same whoever resumes, and wherever."""

from pathlib import Path
from typing import Any

import pytest
from ranks_blend import GLOBAL_BATCH, STEPS, read

from lightning_3d.checkpoint import step_folder
from lightning_3d.testing import RankPool

TIMEOUT_S = 120


def global_batches(ranks: list[Any]) -> list[list[list[int]]]:
    """The rows of each step, those of the coords in order; ranks of one coord read the same."""
    coords: dict[int, Any] = {}
    for coord, rows, _ in ranks:
        assert coords.setdefault(coord, rows) == rows
    return [[row for part in parts for row in part] for parts in zip(*(coords[coord] for coord in sorted(coords)), strict=True)]


@pytest.fixture(scope="module")
def straight(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("blend")
    return folder, pool.run(read, 2, (2, 1, str(folder), None), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(("dp", "tp", "step"), [(4, 1, 3), (1, 1, 4), (2, 2, 6)])
def test_another_dp_resumes_the_same_samples(
    straight: tuple[Path, list[Any]], pool: RankPool, tmp_path: Path, dp: int, tp: int, step: int
) -> None:
    folder, ranks = straight
    whole = global_batches(ranks)
    assert len(whole) == STEPS
    assert {len(batch) for batch in whole} == {GLOBAL_BATCH}
    assert [len(batch[0]) for batch in whole] == [16] * 4 + [32] * 5
    resumed = pool.run(read, dp * tp, (dp, tp, str(tmp_path), str(step_folder(folder, step))), timeout_s=TIMEOUT_S)
    assert global_batches(resumed) == whole[step:]
    tokens = {
        "data/consumed_tokens/nanoset_datatrove": 24 * 16 + 20 * 32,
        "data/consumed_tokens/nanoset_datatrove_u32": 8 * 16 + 20 * 32,
        "consumed_tokens": 32 * 16 + 40 * 32,
    }
    assert all(metrics == tokens for _, _, metrics in [*ranks, *resumed])
