"""What a save may and may not replace, and what becomes of its error."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d.checkpoint import Saver, is_whole, restore
from lightning_3d.errors import CheckpointWriteError


@pytest.fixture
def parts() -> tuple[Any, list[Any], dict[str, Any]]:
    module = torch.nn.Linear(3, 3)
    return module, [torch.optim.SGD(module.parameters(), 0.1)], {"global_step": 1}


def saver(*, in_background: bool) -> Saver:
    made = Saver(in_background=in_background)
    made.connect()
    return made


def test_other_peoples_files_are_left_alone(parts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointWriteError, match=r"step-1 was not written .*: something that is no checkpoint stands there"):
        Saver().save(str(folder), *parts)
    (tmp_path / "step-2").write_text("a file")
    with pytest.raises(CheckpointWriteError, match="something that is no checkpoint stands there"):
        Saver().save(str(tmp_path / "step-2"), *parts)
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_an_older_checkpoint_and_parts_of_one_give_way(parts: Any, tmp_path: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        (tmp_path / "step-1").mkdir(exist_ok=True)
        (tmp_path / "step-1" / name).touch()
    for _ in range(2):
        Saver().save(str(tmp_path / "step-1"), *parts)
        assert is_whole(tmp_path / "step-1")


def test_a_place_that_cannot_be(parts: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"checkpoint .*/file/a/step-1 was not written: .*Not a directory"):
        Saver().save(str(tmp_path / "file/a/step-1"), *parts)


def test_one_that_failed_in_the_background_does_not_cost_the_next(parts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-1").touch()
    writer = saver(in_background=True)
    writer.save(str(tmp_path / "step-1"), *parts)
    writer.save(str(tmp_path / "step-2"), *parts)
    writer.wait()
    assert is_whole(tmp_path / "step-2")
    assert "step-1 was not written" in caplog.text


@pytest.mark.parametrize("after_exception", [False, True])
def test_the_end_of_a_run_tells_of_the_last(parts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, after_exception: bool) -> None:
    (tmp_path / "step-1").touch()
    writer = saver(in_background=True)
    writer.save(str(tmp_path / "step-1"), *parts)
    if after_exception:
        writer.close(after_exception=True)
        assert "step-1 was not written" in caplog.text
        return
    with pytest.raises(CheckpointWriteError, match="step-1 was not written"):
        writer.close(after_exception=False)


class Stages(torch.nn.Module):
    """A model with stages of its own, as ConvNeXt and Swin have, at the top or inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])


@pytest.mark.parametrize("inside", [False, True])
def test_stages_of_a_models_own_keep_their_numbers(inside: bool, tmp_path: Path) -> None:
    model, other = (torch.nn.ModuleDict({"net": Stages()}) if inside else Stages() for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, other)]
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizers[0].step()
    Saver().save(str(tmp_path / "step-1"), model, optimizers[:1], {"global_step": 1})
    restore(str(tmp_path / "step-1"), other, optimizers[1:])
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved, loaded)
        assert torch.equal(optimizers[0].state[saved]["momentum_buffer"], optimizers[1].state[loaded]["momentum_buffer"])
