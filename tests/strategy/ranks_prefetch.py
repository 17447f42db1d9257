"""When FSDP asks for the parameters of each block: the calls of a step in order, with where each block's computing begins between them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from scenario import Replica, Scenario, global_batches, quiet, trainer_of
from torch import Tensor, nn

from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.parallel.blocks import blocks_of
from lightning_3d.parallel.recorder import Call, Recorder
from lightning_3d.strategy import ThreeDStrategy

BLOCKS = 5


class InOrder(pl.Callback):
    """Records the last step's calls; a block says "forward 3" when FSDP is done with it and its first layer begins, and so on."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.recorder = Recorder(trainer.strategy.mesh)
        for number, block in enumerate(blocks_of(module.stages["0"])):
            next(block.children()).register_forward_pre_hook(self._says(f"forward {number}"))
            block.register_forward_hook(self._in_backward(f"backward {number}"))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.calls = []
        self.recorder.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.__exit__(None, None, None)

    def _says(self, what: str) -> Callable[..., None]:
        return lambda *_: self.recorder.calls.append(Call(what, "", 0))

    def _in_backward(self, what: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(self._says(what))  # behind FSDP's

        return hook


def calls(s: Scenario, microbatches: int) -> list[Call]:
    quiet()
    strategy, order = ThreeDStrategy(**s.strategy() | {"batch_accumulation_per_replica": microbatches}), InOrder()
    trainer = trainer_of(strategy, s.world_size, max_steps=2, callbacks=[order])
    trainer.fit(LlamaModule(LlamaConfig(**s.model | {"num_hidden_layers": BLOCKS})), Replica(strategy, global_batches(s, 2), s.rows))
    return order.recorder.calls
