"""Model and optimizer state by names that do not depend on the layout, so that any layout can load what any other saved.

A rank's module holds ``stages.3.layers.17...``; in the file that is ``model.layers.17...``. Optimizer state is keyed by parameter name
(``optimizer.0.state.layers.17.mlp.up_proj.weight.exp_avg``), since the indices of param groups differ between stages. The shards hold
tensors only; options of param groups are plain values and go to trainer.pt by parameter name, once (torch's own flattened state would
pickle a dozen of them for every parameter, half of the time of a small checkpoint).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_3d.parallel.stages import global_name

State = dict[str, Any]

GROUPS = "optimizer_groups"  # key in trainer.pt
OPTIMIZER = "optimizer."  # what names of optimizer state begin with
_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")  # how a step is computed, not what


class OwnState:
    """The state of one rank, as tensors that share memory with its module and optimizers."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._model = get_model_state_dict(module)
        self._states: list[Any] = [get_optimizer_state_dict(module, optimizer) for optimizer in optimizers]

    def by_file_name(self) -> State:
        """All of it, by the names in the file."""
        named = {"model." + self._global(name): value for name, value in self._model.items()}
        for index, state in enumerate(self._states):
            for name, values in state["state"].items():
                named |= {f"{OPTIMIZER}{index}.state.{self._global(name)}.{key}": value for key, value in values.items()}
        return named

    def take(self, loaded: State, groups: Sequence[Sequence[State]]) -> None:
        """Hand back what was loaded: tensors were filled in place, the rest is set here."""
        other = {name: value for name, value in self._model.items() if not isinstance(value, Tensor)}
        if other:
            model = {name: loaded.get("model." + self._global(name), value) for name, value in other.items()}
            set_model_state_dict(self._module, model, options=StateDictOptions(strict=False))
        for name, value in self._model.items():
            _fill(value, loaded.get("model." + self._global(name), value))
        self._module.load_state_dict(self._module.state_dict(keep_vars=True))  # onto itself: nothing is copied, but hooks may be waiting
        for index, (optimizer, state) in enumerate(zip(self._optimizers, self._states, strict=True)):
            for name, values in state["state"].items():
                prefix = f"{OPTIMIZER}{index}.state.{self._global(name)}."
                values |= {key: _fill(value, loaded.get(prefix + key, value)) for key, value in values.items()}
            options = {name: group for group in groups[index] for name in group["params"]}
            for group in state["param_groups"]:
                saved = options.get(self._global(group["params"][0]), {})
                group |= {key: value for key, value in saved.items() if key not in _OF_THIS_RUN}
            set_optimizer_state_dict(self._module, optimizer, state)

    def _global(self, name: str) -> str:
        return global_name(name, self._module)

    def gather_groups(self) -> list[list[State]]:
        """For each optimizer the param groups of all stages, with global names; on rank 0.

        Shapes: none.
        Placement: each rank's groups -> all of them on rank 0.
        Communication: gather of names and options, world, some KiB a rank.
        Source: this project.
        """
        own = [
            [group | {"params": [self._global(name) for name in group["params"]]} for group in state["param_groups"]]
            for state in self._states
        ]
        everyone: list[list[list[State]]] | None = None
        if world_size() > 1:
            everyone = [own] * world_size() if rank() == 0 else None
            dist.gather_object(own, everyone)
        merged: list[list[State]] = [[] for _ in own]
        for groups in everyone or [own]:
            for index, of_optimizer in enumerate(groups):
                merged[index] += [group for group in of_optimizer if group not in merged[index]]
        return merged


def _fill(value: Any, loaded: Any) -> Any:
    """What was loaded; where two stages of this rank have one name, it was into the tensor of the other one."""
    return value.copy_(loaded) if isinstance(value, Tensor) and value is not loaded else loaded


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Processes in the process group; 1 without."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on all ranks.

    Shapes: none.
    Placement: each rank's own -> all of them on all ranks.
    Communication: all-gather of a small object, world.
    Source: this project.
    """
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values
