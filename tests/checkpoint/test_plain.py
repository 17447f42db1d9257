"""What Lightning keeps of a run is read again without unpickling anybody's classes."""

import enum
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage

from lightning_3d.checkpoint.plain import plain, read_plain, write_plain


class Colour(enum.Enum):
    RED = "red"


Point = namedtuple("Point", "x y")

KEPT: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (b"bytes", b"bytes"),
    (Path("a") / "b", "a/b"),
    (Colour.RED, "red"),
    (RunningStage.TRAINING, "train"),
    (np.float64(1.5), 1.5),
    (np.int32(3), 3),
    ([1, (2, {3})], [1, (2, {3})]),
    (Point(1, 2), (1, 2)),
    (OrderedDict(a=1), {"a": 1}),
    ({3: {"x": float("inf")}}, {3: {"x": float("inf")}}),
    (torch.bfloat16, torch.bfloat16),
    (torch.device("cpu"), torch.device("cpu")),
]


@pytest.mark.parametrize(("value", "kept"), KEPT, ids=lambda value: type(value).__name__)
def test_kept(value: Any, kept: Any, tmp_path: Path) -> None:
    write_plain({"value": value}, tmp_path / "file")
    read = read_plain(tmp_path / "file")["value"]
    assert read == kept
    assert type(read) is type(kept)


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    write_plain({"value": torch.arange(100_000)[:2].requires_grad_(False)}, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 10_000
    assert read_plain(tmp_path / "file")["value"].tolist() == [0, 1]


def test_what_cannot_be_kept_is_left_out_with_its_name() -> None:
    with pytest.warns(UserWarning, match=r"'hparams.activation' is left out of the checkpoint: builtin_function_or_method"):
        assert plain({"hparams": {"activation": torch.tanh, "width": 3}}) == {"hparams": {"width": 3}}
    with pytest.warns(UserWarning, match=r"'layers' is left out"):  # a list with a hole would be another list
        assert plain({"layers": [1, object()], "n": 1}) == {"n": 1}
