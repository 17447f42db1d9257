"""What a rank reads of a blend with two stages, in a run that is saved on its way and perhaps resumed by other ranks."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from scenario import quiet, trainer_of

from lightning_3d.callbacks import Checkpoint, Throughput
from lightning_3d.data.stages import DataStage
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.strategy import ThreeDStrategy

DATA = Path(__file__).parent.parent / "data"
SETS = [str(DATA / "nanoset_datatrove"), str(DATA / "nanoset_datatrove_u32")]
GLOBAL_BATCH, STEPS = 8, 9


class Ids(pl.Callback):
    """The rows of each batch."""

    def __init__(self) -> None:
        self.rows: list[list[list[int]]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch["input_ids"].tolist())


def read(dp: int, tp: int, folder: str, resume: str | None) -> tuple[int, list[list[list[int]]], dict[str, float]]:
    """This rank's coord on dp and its rows, over two stages: 3 : 1 of two sets, then from step 5 on 1 : 1 and twice as long."""
    quiet()
    ids = Ids()
    trainer = trainer_of(
        ThreeDStrategy(dp=dp, tp=tp),
        dp * tp,
        max_steps=STEPS,
        max_epochs=-1,
        enable_checkpointing=True,
        log_every_n_steps=1,
        callbacks=[ids, Throughput(), Checkpoint(checkpoints_path=folder, checkpoint_interval=1)],
    )
    data = NanosetDataModule(
        SETS,
        16,
        micro_batch_size=GLOBAL_BATCH // dp,
        dataset_weights=[3, 1],
        data_stages=[DataStage(5, SETS, [1, 1], 32)],
    )
    llama = LlamaConfig(512, 16, 24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
    trainer.fit(LlamaModule(llama), datamodule=data, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "consumed_tokens" in name}
    return trainer.strategy.mesh.coord.dp, ids.rows, metrics
