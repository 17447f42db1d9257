"""TextDataModule on each rank of a layout: the tokens that it trained on, saved on the way and resumed."""

from dataclasses import dataclass, field
from typing import Any

import datasets
import lightning.pytorch as pl
from scenario import quiet, trainer_of

from lightning_3d.callbacks import Checkpoint
from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.text_datamodule import TextDataModule

SEQUENCE, STEPS, SAVED = 16, 10, 5


@dataclass(frozen=True)
class Text:
    """A fit of STEPS steps that saves at step SAVED, unless it says otherwise."""

    layout: tuple[int, int, int]
    folder: str
    data: dict[str, Any]
    resume: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    shuffled_by_each: bool = False

    @property
    def world_size(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append({key: value.tolist() for key, value in batch.items()})


def fit_text(case: Text) -> dict[str, Any]:
    """What this rank saw, or the user's error."""
    quiet()
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = case.folder + "/cache"
    dp, tp, pp = case.layout
    seen = Seen()
    callbacks = [seen, Checkpoint(case.folder + "/checkpoints", SAVED)]
    strategy = ThreeDStrategy(dp=dp, tp=tp, pp=pp)
    trainer = trainer_of(
        strategy, case.world_size, callbacks=callbacks, **{"max_steps": STEPS, "enable_checkpointing": True, **case.trainer}
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    module = LlamaModule(LlamaConfig(vocab_size=512, max_position_embeddings=SEQUENCE, **sizes))
    try:
        arguments = {"micro_batch_size": 2, "batch_accumulation_per_replica": 2, **case.data}
        if case.shuffled_by_each:
            texts = [f"{number} of many" for number in range(100)]
            arguments["dataset"] = datasets.Dataset.from_dict({"text": texts}).shuffle(seed=trainer.global_rank)
        trainer.fit(module, datamodule=TextDataModule(sequence_length=SEQUENCE, **arguments), ckpt_path=case.resume)
    except ConfigError as error:
        return {"error": str(error)}
    validation = trainer.callback_metrics.get("val_lm_loss")
    return {
        "coord": trainer.strategy.distributed_sampler_kwargs["rank"],
        "batches": seen.batches,
        "step": trainer.global_step,
        "validation": None if validation is None else float(validation),
    }
