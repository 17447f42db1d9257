"""Lightning's own callbacks and loggers beside a fit, and what each rank saw of them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks, loggers
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, Data
from scenario import quiet


class Scheduled(GPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        bar = {name: value for name, value in self.trainer.progress_bar_metrics.items() if name != "v_num"}
        self.seen.append({**bar, **{name: float(value) for name, value in self.trainer.callback_metrics.items()}})

    def on_fit_start(self) -> None:
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss


def everything(case: Case, folder: str) -> dict[str, Any]:
    """All that work together, for four epochs unless stopped."""
    quiet()
    torch.set_default_dtype(torch.float64)
    best = callbacks.ModelCheckpoint(Path(folder) / "best", "{epoch}-{val_loss:.5f}", monitor="val_loss", save_top_k=2, save_last=True)
    stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=2)  # a falling loss never improves it
    others = [
        callbacks.LearningRateMonitor("step"),
        callbacks.ModelSummary(),
        callbacks.Timer(timedelta(hours=1)),
        callbacks.TQDMProgressBar(),
        callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    ]
    options = {
        "max_epochs": 4,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "enable_model_summary": True,
    }
    options["logger"] = [loggers.CSVLogger(folder, "csv", ""), loggers.TensorBoardLogger(folder, "tensorboard", "")]
    module = Scheduled()
    trainer = trainer_for(case_with(case, options), best, stopping, *others)
    trainer.fit(module, datamodule=Data(val=22))
    paths = [Path(path).name for path in (best.best_model_path, best.last_model_path, *sorted(best.best_k_models))]
    scores = [float(best.best_model_score), float(stopping.best_score)]
    return {"seen": module.seen, "paths": paths, "scores": scores, "stopped": stopping.stopped_epoch, "step": trainer.global_step}


def case_with(case: Case, options: dict[str, Any]) -> Case:
    return Case(case.layout, case.module, case.strategy, {**case.trainer, **options})


def averaged(case: Case) -> dict[str, Any]:
    """Stochastic weight averaging copies the module; the rich bar; a timer that ends an endless fit."""
    quiet()
    swa = callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    module = Scheduled()
    trainer = trainer_for(case_with(case, {"max_epochs": 2, "enable_progress_bar": True}), swa, callbacks.RichProgressBar())
    trainer.fit(module, datamodule=Data(val=22))
    timed = trainer_for(case_with(case, {"max_epochs": -1}), callbacks.Timer(timedelta(seconds=0.5)))
    timed.fit(Scheduled(), datamodule=Data())
    return {"step": trainer.global_step, "timed": timed.global_step, "shown": module.seen[-1]["shown"]}
