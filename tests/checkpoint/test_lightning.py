"""What Lightning's users do with checkpoints: ModelCheckpoint, validate and test, hyper-parameters, weights for a new run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_resume import (
    SAVED,
    STEPS,
    Layout,
    Momentum,
    NoDecay,
    Run,
    WithAnything,
    evaluate,
    fit,
    fit_from_weights,
    fit_with_model_checkpoints,
)

from lightning_3d.checkpoint import is_whole, load_trainer_state, step_folder
from lightning_3d.testing import RankPool

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Seen]:
    """A run whose module has hyper-parameters of all kinds."""
    run = Run(Layout(pp=2), str(tmp_path_factory.mktemp("run")), module_type=WithAnything)
    return run, pool.run(fit, 2, (run,))


@pytest.fixture(scope="module")
def with_model_checkpoints(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    folder = tmp_path_factory.mktemp("model_checkpoints")
    return folder, pool.run(fit_with_model_checkpoints, 2, (Run(Layout(tp=2), str(folder)),))


def test_model_checkpoint(with_model_checkpoints: tuple[Path, Seen]) -> None:
    folder, seen = with_model_checkpoints
    best, steps = (sorted(path.name for path in (folder / name).iterdir()) for name in ("best", "steps"))
    assert steps == ["step=3.ckpt", "step=6.ckpt"]
    assert best == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]  # the loss falls, so the last two are the best
    assert all(is_whole(path) for name in ("best", "steps") for path in (folder / name).iterdir())
    for rank in seen:
        assert rank["best"] == str(folder / "best" / "step=8.ckpt")
        assert rank["score"] == rank["metric"]
        assert rank["again"] == pytest.approx(rank["metric"], rel=0, abs=1e-12)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_validate_and_test_a_folder_in_any_layout(
    layout: Layout, with_model_checkpoints: tuple[Path, Seen], pool: RankPool, tmp_path: Path
) -> None:
    folder, seen = with_model_checkpoints
    for rank in pool.run(evaluate, layout.world_size, (Run(layout, str(tmp_path)), str(folder / "best" / "last.ckpt"))):
        assert rank["val_lm_loss"] == pytest.approx(seen[0]["metric"], rel=0, abs=1e-12)
        assert rank["test_lm_loss"] == rank["val_lm_loss"]


def test_hyper_parameters_of_any_kind(run: tuple[Run, Seen], pool: RankPool, tmp_path: Path) -> None:
    """Paths become text; what is no plain type is left out, and no reason to fail."""
    path = step_folder(run[0].folder, SAVED)
    kept = load_trainer_state(str(path))["hyper_parameters"]
    assert (kept["corpus"], kept["sizes"]) == ("corpus", [1, (2, 3)])
    assert not {"activation", "mixed"} & kept.keys()
    for mine, theirs in zip(pool.run(fit, 2, (replace(run[0], folder=str(tmp_path), resume=str(path)),)), run[1], strict=True):
        assert mine["losses"] == theirs["losses"][SAVED:]


def test_options_of_the_optimizer_are_resumed(run: tuple[Run, Seen], pool: RankPool, tmp_path: Path) -> None:
    """By parameter name, for each group of each stage: with and without decay. As in torch the checkpoint's win over the run's."""
    path = str(step_folder(run[0].folder, SAVED))
    (groups,) = load_trainer_state(path)["optimizer_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    assert "layers.3.input_layernorm.weight" in groups[3]["params"]
    new = replace(run[0], folder=str(tmp_path), resume=path, module_type=NoDecay)
    assert [seen["losses"] for seen in pool.run(fit, 2, (new,))] == [seen["losses"][SAVED:] for seen in run[1]]


def test_weights_only(with_model_checkpoints: tuple[Path, Seen], pool: RankPool, tmp_path: Path) -> None:
    """They start a new run, in any layout; they do not resume one."""
    path = str(with_model_checkpoints[0] / "steps" / "step=6.ckpt")
    new = Run(Layout(pp=2), str(tmp_path), trainer={"max_steps": 1})
    for seen in pool.run(fit, 2, (replace(new, resume=path),)):
        assert (
            seen["error"]
            == f"ckpt_path={path} holds no 'step' of optimizer.0: it was saved with the weights only, or with another optimizer"
        )
    (from_scratch,), (from_weights,) = (
        {rank["losses"][0] for rank in ranks} for ranks in (pool.run(fit, 2, (new,)), weights(pool, new, path))
    )
    assert from_weights < from_scratch - 0.5


def weights(pool: RankPool, run: Run, path: str) -> Seen:
    return pool.run(fit_from_weights, 2, (replace(run, folder=f"{run.folder}/weights"), path))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("width", {"model": {"hidden_size": 16}}, "of another model: 'embed_tokens.weight' has shape (515, 32) there and (515, 16) here"),
    ("vocabulary", {"model": {"vocab_size": 516}}, "of another model: 'embed_tokens.weight' has shape (515, 32) there and (516, 32) here"),
    ("deeper", {"model": {"num_hidden_layers": 5}}, "of another model: it does not hold 'layers.4."),
    (
        "shallower",
        {"model": {"num_hidden_layers": 3}},
        "of another model: it holds 'layers.3.input_layernorm.weight', which this one lacks",
    ),
    ("tied", {"model": {"tie_word_embeddings": True}}, "of another model: it holds 'lm_head.weight', which this one lacks"),
    ("optimizer", {"module_type": Momentum}, "holds no 'momentum_buffer' of optimizer.0"),
]


@pytest.mark.parametrize(("changes", "message"), [pytest.param(changes, text, id=name) for name, changes, text in WRONG])
def test_a_checkpoint_of_something_else(
    changes: dict[str, Any], message: str, run: tuple[Run, Seen], pool: RankPool, tmp_path: Path
) -> None:
    """All ranks say the same, though only one of them has the part that differs."""
    path = str(step_folder(run[0].folder, SAVED))
    errors = [seen["error"] for seen in pool.run(fit, 2, (replace(run[0], folder=str(tmp_path), resume=path, **changes),))]
    assert errors[0].startswith(f"ckpt_path={path} ")
    assert message in errors[0]
    assert errors == [errors[0]] * 2
    assert "\n" not in errors[0]


def test_no_checkpoint_at_all(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"a checkpoint of a plain Trainer")
    for name in ("missing", "empty", "file"):
        for seen in pool.run(fit, 2, (Run(Layout(dp=2), str(tmp_path), resume=str(tmp_path / name)),)):
            assert f"ckpt_path={tmp_path / name} is not a whole sharded checkpoint" in seen["error"]


def test_step_of_the_moments_counts_the_steps(run: tuple[Run, Seen]) -> None:
    """So that the moments compared above are those of the optimizer."""
    steps = {float(value) for rank in run[1] for key, value in rank["final"].items() if key.endswith(":step")}
    assert steps == {STEPS}
    assert all(torch.any(value != 0) for rank in run[1] for key, value in rank["final"].items() if ":" in key)
