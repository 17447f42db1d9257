"""Model and optimizer state by names that do not depend on the layout, so that any layout can load what any other saved.

A rank's module holds ``stages.3.layers.17...``; in the file that is ``model.layers.17...``. Optimizer state is keyed by parameter name
(``optimizer.0.state.layers.17.mlp.up_proj.weight.exp_avg``), since the indices of param groups differ between stages. The shards hold
tensors only; options of param groups are plain values and go to trainer.pt by parameter name, once (torch's own flattened state would
pickle a dozen of them for every parameter, half of the time of a small checkpoint).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_3d.checkpoint.folder import TRAINER_FILE, begin, commit, is_whole, unfinished
from lightning_3d.checkpoint.plain import read_plain, write_plain
from lightning_3d.checkpoint.planner import LoadPlanner, SavePlanner
from lightning_3d.errors import ConfigError

State = dict[str, Any]

_STAGE = re.compile(r"(^|\.)stages\.\d+\.")
_MOMENT = re.compile(r"(optimizer\.\d+)\.state\..*\.(\w+)")
_HELD_BY_SHARDS = ("state_dict", "optimizer_states")  # Lightning's keys
_GROUPS = "optimizer_groups"
_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")  # how a step is computed, not what


def save(path: str, module: nn.Module, optimizers: Sequence[Optimizer], trainer_state: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank calls this and returns once it is whole.

    Shapes: none.
    Placement: each rank's shards -> files; copies are written once.
    Communication: gather of the plan, world, some KiB a rank; barriers.
    Source: torch.distributed.checkpoint.
    """
    folder = Path(path)
    own = _OwnState(module, optimizers)
    groups = own.gather_groups()
    if _rank() == 0:
        begin(folder)
        rest = {key: value for key, value in trainer_state.items() if key not in _HELD_BY_SHARDS}
        write_plain(rest | {_GROUPS: groups}, unfinished(folder) / TRAINER_FILE)
    _barrier()
    dcp.save(own.by_file_name(), storage_writer=dcp.FileSystemWriter(unfinished(folder)), planner=SavePlanner())
    if _rank() == 0:
        commit(folder)
    _barrier()


def restore(path: str, module: nn.Module, optimizers: Sequence[Optimizer] = (), *, strict: bool = True) -> None:
    """Load model and optimizer state into their own tensors, whatever layout saved them; without optimizers, the weights only.

    Args:
        path: folder of the checkpoint.
        module: the LightningModule, with its stages built.
        optimizers: its optimizers, in the order in which they were saved.
        strict: refuse names that only one of checkpoint and model has; otherwise they are passed over.

    Raises:
        ConfigError: no whole checkpoint at ``path``, one of another model or optimizer, or one without optimizer state.
    """
    if not is_whole(path) or Path(path).is_file():
        raise ConfigError(f"ckpt_path={path} is not a whole sharded checkpoint (a folder with .metadata and {TRAINER_FILE}): name another")
    held = dcp.FileSystemReader(path).read_metadata()
    own = _OwnState(module, optimizers)
    wanted = own.by_file_name()
    _agree(_difference(wanted, held, strict=strict), path, {name for name in wanted if name.startswith("model.")}, held, strict=strict)
    known = {name: value for name, value in wanted.items() if name in held.state_dict_metadata}
    dcp.load(known, checkpoint_id=path, planner=LoadPlanner())
    own.take(known, load_trainer_state(path)[_GROUPS])


def load_trainer_state(path: str) -> State:
    """Lightning's part of a checkpoint."""
    return read_plain(Path(path) / TRAINER_FILE)


class _OwnState:
    """The state of one rank, as tensors that share memory with its module and optimizers."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._model = get_model_state_dict(module)
        self._states: list[Any] = [get_optimizer_state_dict(module, optimizer) for optimizer in optimizers]

    def by_file_name(self) -> State:
        """All of it, by the names in the file."""
        named = {"model." + _global(name): value for name, value in self._model.items()}
        for index, state in enumerate(self._states):
            for name, values in state["state"].items():
                named |= {f"optimizer.{index}.state.{_global(name)}.{key}": value for key, value in values.items()}
        return named

    def take(self, loaded: State, groups: Sequence[Sequence[State]]) -> None:
        """Hand back what was loaded: tensors were filled in place, the rest is set here."""
        model: Any = {name: loaded.get("model." + _global(name), value) for name, value in self._model.items()}
        set_model_state_dict(self._module, model)
        for index, (optimizer, state) in enumerate(zip(self._optimizers, self._states, strict=True)):
            for name, values in state["state"].items():
                values |= {key: loaded.get(f"optimizer.{index}.state.{_global(name)}.{key}", value) for key, value in values.items()}
            options = {name: group for group in groups[index] for name in group["params"]}
            for group in state["param_groups"]:
                saved = options.get(_global(group["params"][0]), {})
                group |= {key: value for key, value in saved.items() if key not in _OF_THIS_RUN}
            set_optimizer_state_dict(self._module, optimizer, state)

    def gather_groups(self) -> list[list[State]]:
        """For each optimizer the param groups of all stages, with global names; on rank 0.

        Shapes: none.
        Placement: each rank's groups -> all of them on rank 0.
        Communication: gather of names and options, world, some KiB a rank.
        Source: this project.
        """
        own = [
            [group | {"params": [_global(name) for name in group["params"]]} for group in state["param_groups"]] for state in self._states
        ]
        everyone: list[list[list[State]]] | None = None
        if _world_size() > 1:
            everyone = [own] * _world_size() if _rank() == 0 else None
            dist.gather_object(own, everyone)
        merged: list[list[State]] = [[] for _ in own]
        for groups in everyone or [own]:
            for index, of_optimizer in enumerate(groups):
                merged[index] += [group for group in of_optimizer if group not in merged[index]]
        return merged


def _global(name: str) -> str:
    return _STAGE.sub(r"\1", name)


def _difference(wanted: State, held: Metadata, *, strict: bool) -> str | None:
    """Why this rank cannot load what it wants; parameters that were never stepped have no optimizer state and need none."""
    kinds = {match.groups() for name in held.state_dict_metadata if (match := _MOMENT.fullmatch(name))}
    for name, value in wanted.items():
        saved = held.state_dict_metadata.get(name)
        if saved is None and strict and name.startswith("model."):
            return f"is of another model: it does not hold '{name.removeprefix('model.')}'"
        if saved is None and (match := _MOMENT.fullmatch(name)) and match.groups() not in kinds:
            return f"holds no '{match[2]}' of {match[1]}: it was saved with the weights only, or with another optimizer"
        size = getattr(saved, "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            shapes = f"{tuple(size)} there and {tuple(value.shape)} here"
            return f"is of another model: '{name.removeprefix('model.')}' has shape {shapes}"
    return None


def _agree(error: str | None, path: str, names: set[str], held: Metadata, *, strict: bool) -> None:
    """Raise on all ranks what any of them found, or what all of them together leave over of the model.

    Shapes: none.
    Placement: each rank's names -> all names on all ranks.
    Communication: all-gather of the names, world, some KiB a rank.
    Source: this project.
    """
    everyone = [(error, names)]
    if _world_size() > 1:
        everyone *= _world_size()
        dist.all_gather_object(everyone, (error, names))
    left = {name for name in held.state_dict_metadata if name.startswith("model.")}.difference(*(names for _, names in everyone))
    over = f"is of another model: it holds '{min(left).removeprefix('model.')}', which this one lacks" if left and strict else None
    found = next((error for error, _ in everyone if error), over)
    if found:
        raise ConfigError(f"ckpt_path={path} {found}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if _world_size() > 1:
        dist.barrier()
