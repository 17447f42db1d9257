"""Evaluation as users run it: during a fit, by test() and predict(), on the same trainer and on fresh ones."""

from dataclasses import replace
from typing import Any

import torch
from ranks_fit import Case, trainer_for
from ranks_gpt import GPT, Data
from scenario import quiet
from torch import Tensor


class InferenceMode(GPT):
    """As trainer.validate runs it where the backend is not gloo; the sanity check comes before the first training step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            super().validation_step(batch, batch_idx)


class Predicts(GPT):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The rows in the batch's order again (``split_batch`` takes every n-th)."""
        parts = self.pipeline_forward(batch)
        whole = torch.empty_like(batch[0])
        for number, part in enumerate(parts):
            whole[number :: len(parts)] = part
        return whole


def fit_then_test(case: Case) -> list[tuple[dict[str, float], list[Tensor]]]:
    """Metrics and predictions of the trainer that fitted, of a fresh trainer, and of a fresh trainer with a batch of another size."""
    quiet()
    torch.set_default_dtype(torch.float64)
    module = case.module()
    trainer = trainer_for(case)
    trainer.fit(module, datamodule=Data(**case.data))
    results = [_evaluate(trainer, module, case.data)]
    results.append(_evaluate(trainer_for(case), module, case.data))
    other = replace(case, strategy=case.strategy | {"batch_accumulation_per_replica": 4})
    results.append(_evaluate(trainer_for(other), module, case.data))
    return results


def _evaluate(trainer: Any, module: Any, data: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    (metrics,) = trainer.test(module, datamodule=Data(**data), verbose=False)
    return metrics, trainer.predict(module, datamodule=Data(**data))


class Counts(GPT):
    """Counts the microbatches of each training batch on the last stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.microbatches: set[int] = set()
        loss, _ = self.pipeline_step(batch)
        self.counts.append(len(self.microbatches))
        return loss

    def pipeline_loss(self, output: Tensor, microbatch: Any) -> Any:
        self.microbatches.add(hash(microbatch[0].numpy().tobytes()))
        return super().pipeline_loss(output, microbatch)


def refit(case: Case) -> list[int]:
    """Microbatches of a batch, with two data modules after each other on one Trainer."""
    quiet()
    module, trainer = Counts(), trainer_for(case)
    module.counts = []
    for count in (2, 4):
        data = Data()
        data.batch_accumulation_per_replica = count
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module, datamodule=data)
    return module.counts


def untrained(case: Case) -> list[Tensor]:
    """Predictions of a trainer that never fitted."""
    quiet()
    torch.set_default_dtype(torch.float64)
    return trainer_for(case).predict(case.module(), datamodule=Data(**case.data))
