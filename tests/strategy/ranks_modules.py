"""Modules that users bring along: parallelised by their own hand, without a pipeline, or written for ModelParallelStrategy."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from ranks_gpt import GPT, LEARNING_RATE, VOCAB, WIDTH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
BLOCK = {"attn.q": COLUMNS, "attn.k": COLUMNS, "attn.v": COLUMNS, "attn.out": ROWS, "fc": COLUMNS, "proj": ROWS}


class ByHand(GPT):
    """torch's own tensor parallelism instead of the plan; embeddings stay whole."""

    tensor_parallel_plan = ()

    def parallelize_stage(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        for block in stage.h.values():
            parallelize_module(block, mesh["tensor_parallel"], BLOCK)

    def pipeline_loss(self, output: Tensor, microbatch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), microbatch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_step(batch)[0]


class ShardedByHand(GPT):
    """FSDP applied in ``parallelize_stage``, though the strategy was told nothing of it."""

    def parallelize_stage(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        for block in stage.h.values():
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(stage, mesh=mesh["data_parallel"])


class Plain(pl.LightningModule):
    """Knows nothing of pipelines; each process draws other weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(torch.distributed.get_rank())
            self.stages = nn.ModuleDict({"0": nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.BatchNorm1d(6), nn.Linear(WIDTH, VOCAB))})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.stages["0"][1].eval()  # statistics of a replica's batch are not those of the whole
        return F.cross_entropy(self.stages["0"](batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)


class PlainManual(Plain):
    """Two backward passes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.manual_backward(0.5 * super().training_step(batch[::-1], batch_idx))
        optimizer.step()


class ForModelParallel(pl.LightningModule):
    """As Lightning's documentation has it for ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, VOCAB)
            self.stages = nn.ModuleDict({"0": nn.Sequential(*layers)})

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.stages["0"], tensor, {"1": COLUMNS, "3": ROWS})
        if data.size() > 1:
            fully_shard(self.stages["0"], mesh=data)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.stages["0"](batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)


class Frozen(GPT):
    """The embedding (a tied head) and the first layer stay as they are."""

    def configure_model(self) -> None:
        super().configure_model()
        self.freeze_some()

    def freeze_some(self) -> None:
        for name, parameter in self.named_parameters():
            if ".wte." in name or ".h.0." in name:
                parameter.requires_grad_(False)


class Thawing(Frozen):
    """Everything is frozen but the last norm, until the third batch."""

    def freeze_some(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".ln_f." in name)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(True)
