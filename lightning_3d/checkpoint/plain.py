"""Lightning's state of a run, in types that ``torch.load(weights_only=True)`` takes.

Hyper-parameters and callbacks may hold anything; a pickle of it would tie the checkpoint to this version of everybody's code, and
Lightning 2.6 loses the user's ``weights_only=False`` on its way to the strategy.
"""

from collections.abc import Mapping
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.manifest import Entry, Recorded
from lightning_3d.checkpoint.store import Place, to_disk


def write_plain(state: Mapping[str, Any], path: Place) -> Entry:
    """Write the state to a file, to the disk; what a manifest says of it."""
    with path.open("wb") as file:
        recorded = Recorded(file)
        torch.save(plain(state), recorded)  # all that it needs of a file
        to_disk(file)
    return recorded.entry()


def read_plain(file: Path | BytesIO) -> dict[str, Any]:
    """What ``write_plain`` wrote, on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)


def plain(value: Any, where: str = "") -> Any:
    """A copy in plain types: paths become text; an entry of a dict that cannot be kept is left out with a warning.

    Raises:
        TypeError: the value itself cannot be kept.
    """
    if isinstance(value, Mapping):
        return _plain_dict(value, where)
    if isinstance(value, list | tuple | set):
        items = [plain(item, where) for item in value]
        return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else set(items)
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return plain(value.value, where)
    kinds: tuple[type[Any], ...] = (bool, int, float, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)  # a subclass would need its class to be read again
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, torch.dtype | torch.device):
        return value
    raise TypeError(type(value).__name__)


def _plain_dict(value: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    kept = {}
    for key, item in value.items():
        name = f"{where}.{key}".lstrip(".")
        try:
            kept[plain(key)] = plain(item, name)
        except TypeError as error:
            rank_zero_warn(f"'{name}' is left out of the checkpoint: {error} is not a plain type")
    return kept
