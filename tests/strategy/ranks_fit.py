"""One fit on each rank, under ThreeDStrategy or under a plain Trainer, in float64: what a rank saw of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from ranks_gpt import GPT, Data
from scenario import global_name, quiet, trainer_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.mesh import DP, SHARD, TP
from lightning_3d.parallel.data import local
from lightning_3d.strategy import ThreeDStrategy


@dataclass(frozen=True)
class Case:
    """A layout (dp, tp, pp), or None for a plain Trainer, and what is particular to the run."""

    layout: tuple[int, int, int] | None
    module: Callable[..., Any] = GPT
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Any], ...] = ()

    @property
    def world_size(self) -> int:
        dp, tp, pp = self.layout or (1, 1, 1)
        return dp * tp * pp * self.strategy.get("cp", 1)


class Record(pl.Callback):
    """Gradients before each optimizer step (by global names), the losses, the norms, the weights at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"gradients": [], "losses": [], "norms": []}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen["gradients"].append(full({name: p.grad for name, p in module.named_parameters() if p.grad is not None}))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:  # empty under manual optimization
            self.seen["losses"].append(float(outputs["loss"]))
        norm = getattr(trainer.strategy, "last_grad_norm", None)
        self.seen["norms"].append(norm if norm is None else float(norm))


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors by their global names; one collective for each axis that cuts any. FSDP cut last, so its cut is undone first."""
    whole = {name: local(tensor).detach().clone() for name, tensor in tensors.items()}
    for axis in (SHARD, DP, TP):
        cut = {name: dim for name, tensor in tensors.items() if (dim := cut_dim(tensor, axis)) is not None}
        if cut:
            group = tensors[next(iter(cut))].device_mesh[axis].get_group()
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, {name: whole[name] for name in cut}, group=group)
            whole |= {name: torch.cat([part[name] for part in parts], dim) for name, dim in cut.items()}
    return {global_name(name): tensor for name, tensor in whole.items()}


def cut_dim(tensor: Tensor, axis: str) -> int | None:
    """The dim that an axis of the mesh cuts, if it does."""
    if not isinstance(tensor, DTensor) or axis not in tensor.device_mesh.mesh_dim_names:
        return None
    placement = tensor.placements[tensor.device_mesh.mesh_dim_names.index(axis)]
    return None if placement.is_replicate() else placement.dim


def trainer_for(case: Case, *callbacks: Any) -> Any:
    strategy: Any = "auto"
    if case.layout:
        dp, tp, pp = case.layout
        strategy = ThreeDStrategy(dp=dp, tp=tp, pp=pp, **{"batch_accumulation_per_replica": 2, **case.strategy})
    options = {"max_epochs": 1, **case.trainer}
    return trainer_of(strategy, case.world_size, callbacks=[*(make() for make in case.callbacks), *callbacks], **options)


def fit(case: Case) -> dict[str, Any]:
    quiet()
    torch.set_default_dtype(torch.float64)
    record = Record()
    trainer = trainer_for(case, record)
    module = case.module()
    trainer.fit(module, datamodule=Data(**case.data))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = full(dict(module.named_parameters()))
    return record.seen | {"weights": weights, "metrics": metrics, "step": trainer.global_step}


def fit_with_maximum(case: Case) -> float:
    """The largest gradient of the last step, by the strategy's own norm."""

    class Maximum(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.value = float(trainer.strategy.gradient_norm(norm_type=float("inf")))

    maximum = Maximum()
    fit(replace(case, callbacks=(lambda: maximum,)))
    return maximum.value
