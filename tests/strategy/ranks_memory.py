"""What is alive when: the graphs of forwards whose backwards are still to come, and the gradients of the last step."""

import weakref
from typing import Any

import lightning.pytorch as pl
import torch
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, Data
from scenario import quiet
from torch import Tensor


class Held:
    """Lives as long as a tensor that a graph keeps for its backward."""

    now = most = 0

    def __init__(self) -> None:
        Held.now += 1
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= 1


def mark(block: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    """Let the graph of a forward keep a ``Held``."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, Held()), lambda kept: kept[0]):
        return (args[0].sin(),)


class Marked(GPT):
    def build_stage(self, index: int, num_stages: int) -> Any:
        stage = super().build_stage(index, num_stages)
        next(iter(stage.h.values())).register_forward_pre_hook(mark)
        return stage


def most_held(case: Case) -> int:
    """The most graphs at one time on this rank; the first step, which infers shapes, does not count."""
    quiet()

    class Forget(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            assert Held.now == 0
            if index == 0:
                Held.most = 0

    trainer_for(case, Forget()).fit(Marked(), datamodule=Data(**case.data))
    return Held.most


def gradients_alive(case: Case) -> list[int]:
    """How many gradients of the last step are alive when each forward begins."""
    quiet()
    last: list[weakref.ref] = []
    alive: list[int] = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            last[:] = [weakref.ref(p.grad) for p in module.parameters()]

        def on_train_start(self, trainer: Any, module: Any) -> None:
            for stage in module.stages.values():
                stage.register_forward_pre_hook(lambda *_: alive.append(sum(ref() is not None for ref in last)))

    trainer_for(case, Watch()).fit(GPT(), datamodule=Data(**case.data))
    assert last
    return alive
