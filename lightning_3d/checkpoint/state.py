"""Model and optimizer state by names that do not depend on the layout, so that any layout can load what any other saved.

A rank's module holds ``stages.3.layers.17...``; in the file that is ``model.layers.17...``. Optimizer state is keyed by parameter name and
flattened (``optimizer.0.state.layers.17.mlp.up_proj.weight.exp_avg``), since the indices of param groups differ between stages.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_3d.checkpoint.folder import TRAINER_FILE, commit, is_whole, unfinished
from lightning_3d.errors import ConfigError

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STAGE = re.compile(r"(^|\.)stages\.\d+\.")


def save(path: str, module: nn.Module, optimizers: Sequence[Optimizer], trainer_state: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank calls this and returns once it is whole.

    Shapes: none.
    Placement: each rank's shards -> files; copies are written once.
    Communication: gather of the plan, world, some KiB a rank; barriers.
    Source: torch.distributed.checkpoint.
    """
    folder = Path(path)
    state = _names(module)[0]
    for index, optimizer in enumerate(optimizers):
        state |= _optimizer_names(module, optimizer, index)[0]
    writer = dcp.FileSystemWriter(unfinished(folder), overwrite=True)
    dcp.save(state, storage_writer=writer)
    if _rank() == 0:
        torch.save(plain(_without_states(trainer_state)), unfinished(folder) / TRAINER_FILE)
        commit(folder)
    if dist.is_initialized():
        dist.barrier()


def restore(path: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load model and optimizer state into their own tensors, whatever layout saved them.

    Raises:
        ConfigError: no checkpoint at ``path``, a parameter that it does not hold, or of another shape; no optimizer state for a fit.
    """
    if not is_whole(path):
        raise ConfigError(f"ckpt_path={path} is not a whole checkpoint (no .metadata and {TRAINER_FILE} in it): give a step folder, or 'last'")
    held = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state, back = _names(module)
    _check(path, state, held)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, {back[name]: value for name, value in state.items()})
    for index, optimizer in enumerate(optimizers):
        _restore_optimizer(path, module, optimizer, index, held)


def load_trainer_state(path: str) -> dict[str, Any]:
    """Lightning's part of a checkpoint."""
    return torch.load(Path(path) / TRAINER_FILE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def plain(value: Any, where: str = "checkpoint") -> Any:
    """The value in types that ``torch.load(weights_only=True)`` takes: paths become text, what cannot be kept is left out with a warning."""
    if isinstance(value, Mapping):
        kept = {key: plain(item, f"{where}.{key}") for key, item in value.items() if _is_plain(item, f"{where}.{key}")}
        return type(value)(kept) if type(value) is dict else kept
    if isinstance(value, list | tuple):
        return type(value)(plain(item, where) for item in value) if type(value) in (list, tuple) else [plain(item, where) for item in value]
    return str(value) if isinstance(value, Path) else value


def _is_plain(value: Any, where: str) -> bool:
    if isinstance(value, Mapping | list | tuple | Path | Tensor | str | bytes | int | float | bool | torch.dtype | type(None)):
        return True
    rank_zero_warn(f"{where} ({type(value).__name__}) is not a plain type and is left out of the checkpoint")
    return False


def _without_states(trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in trainer_state.items() if key not in ("state_dict", "optimizer_states")}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _names(module: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The model's state by its name in the file, and the way back to the module's own names."""
    own = get_model_state_dict(module)
    back = {"model." + _STAGE.sub(r"\1", name): name for name in own}
    return {name: own[mine] for name, mine in back.items()}, back


def _optimizer_names(module: nn.Module, optimizer: Optimizer, index: int) -> tuple[dict[str, Any], dict[str, str]]:
    own = get_optimizer_state_dict(module, optimizer, options=_FLAT)
    back = {f"optimizer.{index}." + _STAGE.sub(r"\1", name): name for name in own}
    return {name: own[mine] for name, mine in back.items()}, back


def _restore_optimizer(path: str, module: nn.Module, optimizer: Optimizer, index: int, held: Mapping[str, Any]) -> None:
    state, back = _optimizer_names(module, optimizer, index)
    known = {name: value for name, value in state.items() if name in held}  # a scheduler may have added keys since (initial_lr)
    moments = [name for name in state if name.startswith(f"optimizer.{index}.state.")]
    if moments and not any(name in known for name in moments):
        raise ConfigError(f"ckpt_path={path} holds no state of optimizer {index} for these parameters: it was saved with weights only or by another optimizer")
    dcp.load(known, checkpoint_id=path)
    set_optimizer_state_dict(module, optimizer, {back[name]: value for name, value in (state | known).items()}, options=_FLAT)


def _check(path: str, state: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if name not in held:
            raise ConfigError(f"ckpt_path={path} is of another model: it does not hold '{name.removeprefix('model.')}'")
        size = getattr(held[name], "size", None)
        if isinstance(value, Tensor) and size is not None and tuple(size) != tuple(value.shape):
            raise ConfigError(
                f"ckpt_path={path} is of another model: '{name.removeprefix('model.')}' has shape {tuple(size)} there and {tuple(value.shape)} here"
            )


