"""What a rank sends in one training step, recorded; and each kind of call once, for the recorder itself."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from scenario import Replica, Scenario, global_batches, quiet, trainer_of
from torch.distributed.fsdp import FSDPModule

from lightning_3d.mesh import Mesh, ParallelDims
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.parallel.recorder import Call, Recorder
from lightning_3d.strategy import ThreeDStrategy


class OneStep(pl.Callback):
    """Records the second step: the first has some that are made once."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.recorder = Recorder(trainer.strategy.mesh)
            self.recorder.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.recorder.__exit__(None, None, None)


def step(s: Scenario, options: dict[str, Any]) -> dict[str, Any]:
    """The calls of a step, and sizes of this rank's part of the model to compare them with."""
    quiet()
    strategy = ThreeDStrategy(**s.strategy() | options)
    one = OneStep()
    module = LlamaModule(LlamaConfig(**s.model))
    trainer = trainer_of(strategy, s.world_size, max_steps=2, gradient_clip_val=1.0, callbacks=[one])
    trainer.fit(module, Replica(strategy, global_batches(s, 2), s.rows))
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    units = [unit for unit in units if any(not name.startswith("layers.") for name, _ in unit.named_parameters())]  # with some of its own
    return {
        "calls": one.recorder.calls,
        "text": str(one.recorder),
        "units": len(units),
        "layers": sum(len(stage.layers) for stage in module.stages.values()),
        "nbytes": sum(p.numel() * p.element_size() for p in module.parameters()),
    }


def each_once() -> list[Call]:
    """What two ranks can call: methods of a group, functional ones, messages."""
    quiet()
    mesh = Mesh.build(ParallelDims(pp=1, dp=1, tp=2), "cpu")
    x, pair, peer = torch.ones(4), torch.empty(8), 1 - dist.get_rank()
    with Recorder(mesh) as recorder:
        dist.all_reduce(x.clone(), group=mesh.tp_group)
        dist.all_gather_into_tensor(pair, x, group=mesh.tp_group)
        dist.reduce_scatter_tensor(torch.empty(4), pair, group=mesh.tp_group)
        dist.all_gather([torch.empty(4), torch.empty(4)], x, group=mesh.tp_group)
        dist.broadcast(x, 0, group=mesh.tp_group)
        dist.all_to_all_single(torch.empty(4), x, group=mesh.tp_group)
        funcol.all_reduce(x, "sum", mesh.tp_group).sum()
        funcol.all_gather_tensor(x, 0, mesh.tp_group).sum()
        operations = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(4), peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.all_reduce(x)
    return recorder.calls
