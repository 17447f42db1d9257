"""Proposed layouts, starter recipes and pictures."""

from pathlib import Path

import pytest
import yaml
from ranks_planned import Case

from lightning_3d.__main__ import main
from lightning_3d.commands.init import SHAPES
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.planning.estimate import estimate
from lightning_3d.planning.gpus import GPUS, Gpu
from lightning_3d.planning.pictures import draw
from lightning_3d.planning.search import proposals, search

ROOT = Path(__file__).parent.parent.parent


def small(mib: float) -> Gpu:
    return Gpu("small", int(mib * 2**20), 1e12, 1e10, 1e9)


@pytest.mark.slow
def test_proposals_fit_keep_the_batch_and_come_by_time() -> None:
    case = Case(ParallelDims(dp=8), microbatches=2)
    found = search(case.build(), case.setting, small(4))
    assert len(found) >= 3
    assert all(made.fits and made.setting.global_batch_tokens == case.setting.global_batch_tokens for made in found)
    assert [made.step_s for made in found] == sorted(made.step_s for made in found)
    with pytest.raises(ConfigError, match="no layout fits"):
        proposals(search(case.build(), case.setting, small(0.01)), small(0.01))


def test_shapes_are_those_of_the_fragments() -> None:
    for size, shape in SHAPES.items():
        assert yaml.safe_load((ROOT / f"configs/model/llama_{size}.yaml").read_text()) == shape, size


@pytest.mark.parametrize(("size", "gpus"), [("tiny", 4), pytest.param("160m", 8, marks=pytest.mark.slow)])
def test_a_starter_recipe_is_valid(size: str, gpus: int, tmp_path, capsys) -> None:
    path = tmp_path / "recipe.yaml"
    assert main(["init", "--size", size, "--gpus", str(gpus), "--output", str(path)]) == 0
    text = path.read_text()
    assert all(text.splitlines()[line].startswith(f"# {word}:") for line, word in enumerate(("What", "Hardware", "Command", "Measured")))
    assert main(["plan", "--config", str(path)]) == 0
    assert "verdict     fits" in capsys.readouterr().out
    assert main(["init", "--size", size, "--gpus", str(gpus), "--output", str(path)]) == 2
    assert main(["init", "--size", "tiny", "--gpus", "0"]) == 2
    assert "gpus=0" in capsys.readouterr().err


def test_pictures_are_written(tmp_path) -> None:
    case = Case(ParallelDims(dp=2, pp=2), {"pp_engine": "interleaved_1f1b", "virtual_stages": 2})
    paths = draw(estimate(case.build(), case.setting, GPUS["h100-80gb"]), str(tmp_path))
    assert sorted(Path(path).name for path in paths) == [
        f"{name}.{kind}" for name in ("memory", "mesh", "schedule") for kind in ("png", "svg")
    ]
    assert all(Path(path).stat().st_size > 5000 for path in paths)
