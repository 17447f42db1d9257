"""A run as it is, to hold its plan against: what each rank holds, sends, and needs in memory at most."""

import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from scenario import quiet, trainer_of
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.mesh import ParallelDims
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.recorder import Recorder
from lightning_3d.parallel.schedules import stage_coords
from lightning_3d.parallel.stages import Layout
from lightning_3d.planning.setting import Setting
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.synthetic_datamodule import SyntheticDataModule

FIRST_BATCH = 3  # to look at: the guard compares batches 0 to 2, and the optimizer's state is there
BATCHES = 3  # the least of their peaks counts: on a busy machine gloo's threads hold tensors for a while after they were sent
LLAMA = LlamaConfig(
    vocab_size=511, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
)


@dataclass(frozen=True)
class Case:
    """A layout, and what is particular to the run."""

    dims: ParallelDims
    strategy: dict[str, Any] = field(default_factory=dict)
    llama: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 4
    micro_batch_size: int = 2
    sequence_length: int = 64
    precision: str = "32-true"
    mask_documents: bool = False

    def build(self) -> LlamaModule:
        return LlamaModule(replace(LLAMA, **self.llama), AdamW(learning_rate=1e-3), **self.module)

    @property
    def setting(self) -> Setting:
        options = dict(self.strategy)
        options["cp_method"] = options.get("cp_method", "ring")
        engine, virtual = options.pop("pp_engine", "1f1b"), options.pop("virtual_stages", 1)
        return Setting(
            Layout(self.dims, stage_coords(engine, self.dims.pp, virtual), **options),
            engine,
            self.microbatches,
            self.micro_batch_size,
            self.sequence_length,
            self.precision,
            self.mask_documents,
            on_cpu=True,
        )


class Peak(TorchDispatchMode):
    """The most bytes that tensors' storages have at once; sizes are asked for anew each time, since FSDP changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, out)):
            if isinstance(leaf, torch.Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                self.storages.setdefault(storage._cdata, weakref.ref(storage))
        self.bytes = max(self.bytes, self.now())
        return out

    def now(self) -> int:
        alive = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


class Watch(pl.Callback):
    """Notes what each batch sends (the last one stays), and its peak."""

    def __init__(self) -> None:
        self.recorder, self.peak = Recorder(), Peak()
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.calls = []
        self.peak.bytes = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sent = Counter((call.op, call.nbytes) for call in self.recorder.calls if call.op not in ("receive", "barrier"))
        self.counts = trainer.strategy.parameter_counts()
        self.peaks.append(self.peak.bytes)


def observed(case: Case) -> dict[str, Any]:
    """Parameters (of the model, on this rank), collectives of a step, and the peak of tensors in bytes."""
    quiet()
    dims, watch = case.dims, Watch()
    strategy = ThreeDStrategy(
        dp=dims.dp,
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        dp_replicate=dims.replicate,
        batch_accumulation_per_replica=case.microbatches,
        **case.strategy,
    )
    data = SyntheticDataModule(
        511, case.sequence_length, case.micro_batch_size, case.microbatches, mask_documents=case.mask_documents, num_samples=1 << 12
    )
    with watch.recorder, watch.peak:
        trainer = trainer_of(
            strategy,
            dims.world_size,
            callbacks=[watch],
            max_steps=FIRST_BATCH + BATCHES,
            max_epochs=-1,
            gradient_clip_val=1.0,
            precision=case.precision,
        )
        trainer.fit(case.build(), datamodule=data)
    return {"counts": watch.counts, "collectives": dict(watch.sent), "peak": min(watch.peaks[FIRST_BATCH:])}
