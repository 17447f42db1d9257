"""Steps in which nobody reads a tensor's value: on a GPU each such reading waits for all that was asked of it before."""

import traceback
from typing import Any

import torch
from ranks_fit import Case, trainer_for
from ranks_precision import CONFIG
from scenario import Replica, quiet
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.callbacks import GradNorm, ProgressBar
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW

READ = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
FIRST, STEPS = 8, 6  # the guard compares the batches of the first 3 steps, and reads the result; the 8th is logged

BATCHES = FIRST + STEPS + 2


class Readings(TorchDispatchMode):
    """Where a value is read; but numbers of microbatches, which are on the CPU whatever the device, and the scale of gradients on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READ and not (func.overloadpacket.__name__ == READ[0] and args[0].dtype == torch.int64):
            if any(frame.name == "deliver" for frame in traceback.extract_stack()):
                return func(*args, **kwargs or {})
            frames = [frame for frame in traceback.extract_stack() if "_dispatch" not in frame.filename][-8:]
            self.places.append(" < ".join(f"{frame.filename.split('/')[-1]}:{frame.lineno} {frame.name}" for frame in reversed(frames)))
        return func(*args, **kwargs or {})


def readings(case: Case, module_type: Any = LlamaModule) -> list[str]:
    """The places of the steps after the first ones, none of which is due for a log."""
    quiet()
    seen = Readings()

    class Module(module_type):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == FIRST:
                seen.__enter__()
            if batch_idx == FIRST + STEPS:  # the bar shows the last step
                seen.__exit__(None, None, None)

    ids = torch.randint(0, CONFIG.vocab_size, (8, 17), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
    options = {
        "gradient_clip_val": 0.5,
        "log_every_n_steps": FIRST,
        "enable_progress_bar": True,
        **case.trainer,
    }
    trainer = trainer_for(Case(case.layout, strategy=case.strategy, trainer=options), GradNorm(), ProgressBar())
    rows = 8 // (case.layout or (1,))[0]
    trainer.fit(Module(CONFIG, AdamW(learning_rate=1e-3), z_loss_coefficient=1e-3), Replica(trainer.strategy, [batch] * BATCHES, rows))
    return seen.places


class Reads(LlamaModule):
    """What must be found."""

    def pipeline_loss(self, output: Any, microbatch: Any) -> Any:
        loss, metrics = super().pipeline_loss(output, microbatch)
        assert float(loss) > 0
        return loss, metrics
