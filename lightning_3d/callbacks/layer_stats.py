"""Norm, maximum and share of zeros of each layer's weights, gradients and activations, over the whole model.

Every element is counted by exactly one rank, as in the gradient norm; so two all-reduces over the world give the numbers of one process,
in every layout and under the same names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_3d.callbacks.log_due import log_due
from lightning_3d.optim.clipping import parameters_of
from lightning_3d.parallel.stages import global_name

Sums = Float[Tensor, "4"]  # of squares, of zeros, of elements; and the largest absolute value


class LayerStats(Callback):
    """Logs ``weights/norm/layers.3`` and so on, in steps that are due.

    For ``weights`` (before the step), ``gradients`` (as the optimizer will use them, before clipping) and ``activations`` (what a block
    gives to the next, over the batch that ends the step): ``norm`` is the 2-norm over all elements, ``max`` the largest absolute
    value, ``zeros`` the share of elements that are exactly 0, from 0 to 1. A layer is a numbered block (``layers.3``), or what stands
    beside the blocks (``embed_tokens``, ``lm_head``); only blocks have activations. Each due step reads all weights and gradients
    three times and sends about 200 bytes a layer.

    Args:
        every_n_steps: of those steps whose logs are due (``Trainer.log_every_n_steps``), those that are a multiple of this.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        self.every_n_steps = every_n_steps
        self._handles: list[RemovableHandle] = []
        self._sums: dict[str, Sums] = {}
        self._collects = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Between blocks ranks of a tp group hold the same activations, unless they share the sequence.
        coord = getattr(getattr(trainer.strategy, "mesh", None), "coord", None)
        if coord is not None and coord.tp and not getattr(trainer.strategy, "sequence_parallel", False):
            return
        for name, block in pl_module.named_modules():
            if (layer := global_name(name, pl_module)) == layer_of(layer) and layer.rpartition(".")[2].isdigit():
                self._handles.append(block.register_forward_hook(lambda _, __, out, layer=layer: self._activation(layer, out)))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        due = (trainer.global_step + 1) % self.every_n_steps == 0
        self._sums = {}
        self._collects = due and log_due(trainer)

    def _activation(self, layer: str, output: Any) -> None:
        if self._collects and torch.is_grad_enabled() and isinstance(output, Tensor):  # without gradients torch infers shapes
            self._add("activations", layer, output)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._collects:
            mine = {id(parameter) for parameter in parameters_of(optimizer)}
            for name, parameter in counted_parameters(trainer, pl_module).items():
                if id(parameter) not in mine:
                    continue
                self._add("weights", layer_of(name), parameter)
                if parameter.grad is not None:
                    self._add("gradients", layer_of(name), parameter.grad)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        if self._collects:
            for name, value in statistics(all_reduced(self._sums, trainer)).items():
                pl_module.log(name, value)
        self._collects = False

    @torch.no_grad()
    def _add(self, kind: str, layer: str, tensor: Shaped[Tensor, "..."]) -> None:
        new = sums_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach())
        old = self._sums.get(f"{kind}/{layer}", torch.zeros_like(new))
        self._sums[f"{kind}/{layer}"] = torch.cat([old[:3] + new[:3], torch.maximum(old[3:], new[3:])])


def sums_of(tensor: Shaped[Tensor, "..."]) -> Sums:
    """What adds up over parts of a tensor, and the maximum."""
    if tensor.numel() == 0:
        return torch.zeros(4, dtype=torch.float64, device=tensor.device)
    squares = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).double().square()
    zeros, count = (tensor == 0).sum().double(), tensor.new_full((), tensor.numel(), dtype=torch.float64)
    return torch.stack([squares, zeros, count, tensor.abs().max().double()])


def all_reduced(sums: Mapping[str, Sums], trainer: Trainer) -> dict[str, Sums]:
    """Over all parts of the model.

    Shapes: (4,) for each name.
    Placement: each rank's parts -> replicated over the world.
    Communication: all-gather of the names, and all-reduce of 32 bytes a name, twice, world; nothing under other strategies, whose ranks
        hold the whole model.
    Source: this project.
    """
    if trainer.world_size == 1 or not hasattr(trainer.strategy, "counted_parameters"):
        return dict(sums)
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, list(sums))
    names = list(dict.fromkeys(name for each in everyone for name in each))
    zero = torch.zeros(4, dtype=torch.float64, device=trainer.strategy.root_device)
    table = torch.stack([sums.get(name, zero).to(zero.device) for name in names])  # those of offloaded weights are on the CPU
    largest = table[:, 3].clone()
    dist.all_reduce(table)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    table[:, 3] = largest
    return dict(zip(names, table.unbind(), strict=True))


def statistics(sums: Mapping[str, Sums]) -> dict[str, Float[Tensor, ""]]:
    """By the names under which they are logged."""
    found: dict[str, Tensor] = {}
    for name, (squares, zeros, count, largest) in ((name, each.unbind()) for name, each in sums.items()):
        kind, layer = name.split("/", 1)
        found |= {f"{kind}/norm/{layer}": squares.sqrt(), f"{kind}/max/{layer}": largest, f"{kind}/zeros/{layer}": zeros / count}
    return found


def counted_parameters(trainer: Trainer, module: LightningModule) -> Mapping[str, nn.Parameter]:
    """The parameters, or parts of them, that this rank counts, by their global names."""
    of_strategy = getattr(trainer.strategy, "counted_parameters", None)
    named: Iterable[tuple[str, nn.Parameter]] = of_strategy().items() if of_strategy is not None else module.named_parameters()
    return {global_name(name, module): parameter for name, parameter in named}


def layer_of(name: str) -> str:
    """``layers.3`` of ``layers.3.mlp.up_proj.weight``, ``lm_head`` of ``lm_head.weight``."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
