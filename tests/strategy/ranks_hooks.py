"""The order in which Lightning calls a callback's and a module's hooks."""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, Data
from scenario import quiet

OTHERS = ("setup", "teardown", "configure_model", "configure_optimizers")
STEPS = (
    *("training_step", "validation_step", "backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
    *("lr_scheduler_step", "prepare_data", "transfer_batch_to_device"),
)


def hooks_of(cls: type, more: tuple[str, ...] = ()) -> list[str]:
    names = [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]
    return names + [name for name in more if hasattr(cls, name)]


def traced(cls: type, names: list[str], trace_of: Callable[..., list[str]]) -> type:
    """A subclass that notes the name of each hook before it runs."""

    def recorder(name: str) -> Callable[..., Any]:
        original = getattr(cls, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace_of(self, *args).append(f"{'callback' if issubclass(cls, pl.Callback) else 'module'}.{name}")
            return original(self, *args, **kwargs)

        return method

    return type(cls.__name__, (cls,), {name: recorder(name) for name in names})


class Scheduled(GPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class Manual(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.pipeline_step(batch)[0])
        optimizer.step()
        self.lr_schedulers().step()


def trace(case: Case) -> list[str]:
    quiet()
    module = traced(case.module, hooks_of(case.module, OTHERS + STEPS), lambda self, *args: self.trace)
    module.trace = seen = []  # type: ignore[attr-defined]
    callback = traced(pl.Callback, hooks_of(pl.Callback, OTHERS), lambda self, *args: seen)
    trainer = trainer_for(case, callback())
    trainer.fit(module(), datamodule=Data(val=16))
    return seen
