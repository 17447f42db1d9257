"""A checkpoint saved in one layout resumes in another: weights and moments bitwise, the next steps as if nothing had happened.

Each layout saves once and resumes what the one before it in a round saved. The rounds are such that each size of an axis, and each mode,
changes into each other one, and that each two of them change together. Of the sizes, tp and dp divide few: 515 tokens, 45 ffn columns.
"""

from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_resume import GLOBAL_BATCH, SAVED, Layout, Run, fit

from lightning_3d.checkpoint import step_folder
from lightning_3d.parallel.data import DATA_PARALLEL_MODES
from lightning_3d.testing import RankPool

Seen = list[dict[str, Any]]

LAYOUTS = [
    Layout(),
    Layout(dp=2, mode="fsdp"),
    Layout(tp=2),
    Layout(dp=4, mode="hsdp"),
    Layout(pp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(pp=2, virtual=2),
    Layout(dp=2, tp=2, mode="fsdp"),
    Layout(dp=2),
    Layout(pp=4),
    Layout(dp=2, pp=2, mode="zero2"),
    Layout(tp=4, sequence_parallel=True),
]
MODES = [
    Layout(dp=2),
    Layout(dp=2, tp=2, mode="zero2", sequence_parallel=True),
    Layout(dp=4),
    Layout(dp=2, pp=2, virtual=2, mode="fsdp"),
    Layout(dp=2, pp=2, mode="zero2"),
    Layout(dp=4, mode="hsdp"),
    Layout(dp=4, mode="zero2"),
    Layout(dp=2, tp=2, mode="fsdp"),
    Layout(dp=2, pp=2),
    Layout(dp=4, mode="hsdp"),
]
AXES = [Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2, virtual=2), Layout(pp=4)]
CONTEXT = [
    Layout(cp=2),
    Layout(dp=2, mode="fsdp"),
    Layout(tp=2, cp=2, sequence_parallel=True),
    Layout(pp=2, virtual=2),
    Layout(dp=2, cp=2, mode="fsdp"),
]
OF_EIGHT = [
    Layout(dp=2, tp=2, pp=2, mode="fsdp"),
    Layout(dp=4, tp=2, mode="hsdp", sequence_parallel=True),
    Layout(dp=4, tp=2, mode="fsdp"),
    Layout(tp=2, pp=4, sequence_parallel=True),
    Layout(dp=2, tp=2, pp=2, virtual=2, mode="zero2"),
]
V_SHAPED = [Layout(dp=2, pp=2, virtual=2, mode="fsdp", engine="zbv"), Layout(pp=2, virtual=2)]
TIED = [Layout(), Layout(pp=2), Layout(dp=2, pp=2, mode="fsdp"), Layout(tp=2, pp=2), V_SHAPED[0]]  # the last: twice on one rank
OFFLOADED = [
    Layout(dp=2, tp=2, mode="fsdp", sequence_parallel=True, cpu_offload=True, background=True),
    Layout(pp=2),
    Layout(dp=2, pp=2, mode="zero2", cpu_offload=True),
]
TIMEOUT_S = 250  # eight processes may have to start first
ONWARD = {"max_steps": SAVED + 3}


class Saved:
    """Runs that saved at step SAVED, each run once."""

    def __init__(self, pool: RankPool, root: Path) -> None:
        self._pool, self._root, self._seen = pool, root, dict[Any, Seen]()

    def by(self, layout: Layout, **model: Any) -> tuple[str, Seen]:
        key = f"{layout}-{sorted(model.items())}"
        folder = self._root / str(layout) / str(len(model))
        if key not in self._seen:
            run = Run(layout, str(folder), model=model, trainer=ONWARD)
            self._seen[key] = [owned(seen) for seen in self._pool.run(fit, layout.world_size, (run,), timeout_s=TIMEOUT_S)]
        return str(step_folder(folder, SAVED)), self._seen[key]


def owned(seen: dict[str, Any]) -> dict[str, Any]:
    """With copies of the tensors: each one that a process has sent holds a file open."""
    return {
        key: {name: tensor.clone() for name, tensor in value.items()} if isinstance(value, dict) else value for key, value in seen.items()
    }


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory.mktemp("saved"))


def pairs(layouts: list[Layout]) -> list[Any]:
    return [pytest.param(a, b, id=f"{a}_to_{b}") for a, b in zip(layouts, [*layouts[1:], layouts[0]], strict=True)]


def slow(case: Any) -> Any:
    return pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)


def check(a: Layout, b: Layout, saved: Saved, pool: RankPool, folder: Path, **model: Any) -> None:
    path, before = saved.by(a, **model)
    after = pool.run(fit, b.world_size, (Run(b, str(folder), resume=path, model=model, trainer=ONWARD),), timeout_s=TIMEOUT_S)
    whole = {key: value for rank in before for key, value in rank["saved"].items()}
    for rank in after:
        for key, value in rank["loaded"].items():
            assert torch.equal(value, whole[key]), f"{key} is not what was saved"
        assert rank["first_step"] == SAVED
        assert rank["consumed_at_start"] == SAVED * GLOBAL_BATCH
        assert rank["rates"] == before[0]["rates"][SAVED:]
        assert rank["losses"] == pytest.approx(before[0]["losses"][SAVED:], rel=0, abs=1e-10)
    assert set().union(*(rank["loaded"] for rank in after)) == whole.keys()
    final = {key: value for rank in before for key, value in rank["final"].items()}
    for rank in after:
        for key, value in rank["final"].items():
            torch.testing.assert_close(value, final[key], rtol=0, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


def axes(layout: Layout) -> dict[str, Any]:
    """What a layout is made of; one replica has no mode."""
    names = ["dp", "tp", "pp", "cp", "virtual", "sequence_parallel", *["mode"] * (layout.dp > 1)]
    return {name: getattr(layout, name) for name in names}


def test_everything_changes_into_everything() -> None:
    rounds = [pair.values for each in (LAYOUTS, MODES, AXES, CONTEXT, OF_EIGHT) for pair in pairs(each)]
    changes = [(axes(a), axes(b)) for a, b in rounds]
    sizes = dict.fromkeys(("dp", "tp", "pp"), (1, 2, 4)) | {"cp": (1, 2), "virtual": (1, 2), "sequence_parallel": (False, True)}
    for axis, values in (sizes | {"mode": DATA_PARALLEL_MODES}).items():
        assert {(a.get(axis), b.get(axis)) for a, b in changes} >= set(permutations(values, 2)), axis
    together = {(one, other) for a, b in changes for one, other in combinations(a, 2) if a[one] != b[one] and a[other] != b.get(other)}
    assert together >= set(combinations([*sizes, "mode"], 2))


@pytest.mark.parametrize(("a", "b"), [*pairs(LAYOUTS), *pairs(MODES), *pairs(AXES), *pairs(CONTEXT), *pairs(V_SHAPED)])
def test_resumes_elsewhere(a: Layout, b: Layout, saved: Saved, pool: RankPool, tmp_path: Path) -> None:
    check(a, b, saved, pool, tmp_path)


@pytest.mark.parametrize(("a", "b"), [*pairs(TIED), *pairs(OFFLOADED)])
def test_tied_embeddings_resume_elsewhere(a: Layout, b: Layout, saved: Saved, pool: RankPool, tmp_path: Path) -> None:
    check(a, b, saved, pool, tmp_path, tie_word_embeddings=True)


@pytest.mark.parametrize(("a", "b"), [pairs(OF_EIGHT)[0], *map(slow, pairs(OF_EIGHT)[1:])])
def test_resumes_on_eight_ranks(a: Layout, b: Layout, saved: Saved, pool: RankPool, tmp_path: Path) -> None:
    """9 ffn columns over tp=2, then over dp=4, are (2, 2, 1, 0) and (1, 1, 1, 1) rows: one rank holds none."""
    check(a, b, saved, pool, tmp_path, intermediate_size=9)
