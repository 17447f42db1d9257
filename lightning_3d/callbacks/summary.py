"""What runs, and what came of it.

Lightning's ModelSummary counts the modules of rank 0, which under a pipeline is the first stage (1,136 of 2,309 parameters in
a trial). This one takes its place: a few lines before the first step (layout, true sizes, tokens, where things go), and a few
after the last (losses from first to last, where things are, how to go on).
"""

import shlex
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_3d.callbacks.expected_memory import expected_memory
from lightning_3d.callbacks.parameters import parameter_counts
from lightning_3d.parallel.float8 import described


class Summary(ModelSummary):
    """Prints layout, sizes and folders when training starts, and losses, folders and the command that resumes when it ends.

    Args:
        loss: name of the training metric whose first and last values are shown.
        val_loss: name of the validation metric whose first and last values are shown; the sanity check counts as the first.
    """

    def __init__(self, loss: str = "lm_loss", val_loss: str = "val_lm_loss") -> None:
        super().__init__()
        self.loss = loss
        self.val_loss = val_loss
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first, self._last = {}, {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total, local = parameter_counts(trainer, pl_module)
        held = "" if total == local else f", {local:,} of them on this rank"
        lines = {"layout": layout(trainer), "parameters": f"{total:,}{held}", **in_float8(trainer, pl_module)}
        expected = expected_memory(trainer, pl_module) if trainer.is_global_zero else None
        lines |= {"memory": expected} if expected else {}
        lines |= {"step": self._step(trainer), **folders(trainer)}
        show(trainer, lines)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        self._remember(trainer, self.loss)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remember(trainer, self.val_loss)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        losses = {name: change(float(first), float(self._last[name])) for name, first in self._first.items()}
        last = last_checkpoint(trainer)
        steps = f"{trainer.global_step:,}" + ("" if self._first else ", all of them done before")
        resume = {"resume": resume_command(trainer, last)} if last else {}
        show(trainer, {"steps": steps, **losses, **folders(trainer, last), **resume})

    def _remember(self, trainer: Trainer, name: str) -> None:
        """Keep the first and the last value, as tensors: nobody waits for the device here."""
        if name in trainer.callback_metrics:  # emptied when training begins, so that the sanity check's values are gone then
            self._last[name] = trainer.callback_metrics[name].detach().clone()
            self._first.setdefault(name, self._last[name])

    @staticmethod
    def _step(trainer: Trainer) -> str:
        tokens = getattr(getattr(trainer, "datamodule", None), "global_batch_tokens", None)
        parts = [f"{tokens * trainer.accumulate_grad_batches:,} tokens"] if tokens else []
        if trainer.max_steps > 0:
            parts += [f"{trainer.global_step:,} of {trainer.max_steps:,} steps done"]
        return ", ".join(parts) or "unbounded"


def change(first: float, last: float) -> str:
    """From the first value to the last, and by what share."""
    return f"{first:.4f} -> {last:.4f}" + (f" ({last / first - 1:+.0%})" if first else "")


def layout(trainer: Trainer) -> str:
    """One line: the sizes of the axes, or the strategy's name, and the devices."""
    strategy, devices = trainer.strategy, f"{trainer.world_size} {trainer.strategy.root_device.type} rank" + "s" * (trainer.world_size > 1)
    dims = getattr(strategy, "dims", None)
    if dims is None:
        return f"{type(strategy).__name__} on {devices}"
    names = ("data_parallel", "pp_engine", *["cp_method"] * (dims.cp > 1))
    modes = ", ".join(str(getattr(strategy, name)) for name in names if hasattr(strategy, name))
    return f"{dims.describe()} on {devices}, {modes}"


def in_float8(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    """Which linears of this rank are computed in float8, and how."""
    float8 = getattr(trainer.strategy, "float8", None)
    built = getattr(pl_module, "built", None)
    names, gathered = getattr(built, "float8", []), getattr(built, "float8_gathered", [])
    return {} if float8 is None else {"float8": described(names, float8, gathered)}


def folders(trainer: Trainer, last: str | None = None) -> dict[str, str]:
    """Where checkpoints and logs are, or will be."""
    callback = trainer.checkpoint_callback
    checkpoints = last or getattr(callback, "checkpoints_path", None) or getattr(callback, "dirpath", None)
    logs = [logger.log_dir or logger.save_dir for logger in trainer.loggers if hasattr(logger, "log_dir") or logger.save_dir]
    shown = {"checkpoints": checkpoints, "logs": ", ".join(str(log) for log in logs)}
    return {name: str(value) for name, value in shown.items() if value}


def last_checkpoint(trainer: Trainer) -> str | None:
    """The newest checkpoint that the run has written, else the one that it went on from."""
    callback = trainer.checkpoint_callback
    paths = [getattr(callback, name, None) for name in ("last_model_path", "best_model_path")]
    return next((str(path) for path in [*paths, trainer.ckpt_path] if path), None)


def resume_command(trainer: Trainer, checkpoint: str) -> str:
    """What to type to go on from ``checkpoint``, for twice the steps if all are done: our command line, or a line of Python."""
    if getattr(sys.modules["__main__"], "__package__", None) != "lightning_3d":
        return f"trainer.fit(..., ckpt_path={checkpoint!r})"
    options = {"--ckpt_path": "last"}
    if 0 < trainer.max_steps <= trainer.global_step:
        options["--trainer.max_steps"] = str(2 * trainer.max_steps)
    old = [i for i, word in enumerate(sys.argv) if word in options]
    words = [word for i, word in enumerate(sys.argv) if i and i not in old and i - 1 not in old]
    return shlex.join(["python", "-m", "lightning_3d", *words, *(word for option in options.items() for word in option)])


def show(trainer: Trainer, lines: dict[str, str]) -> None:
    """Print aligned lines on rank 0."""
    if trainer.is_global_zero:
        width = max(map(len, lines))
        print("\n".join(["", *(f"  {name:{width}}  {value}" for name, value in lines.items()), ""]), flush=True)
