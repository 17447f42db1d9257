"""What the benchmarks share: a Llama, its plain PyTorch loop, and a Trainer that takes turns with that loop.

Machines are noisy, and processes that run at once slow each other down. So one ``fit`` is cut into segments of a few steps, and between two
of them rank 0 runs as many steps of the plain loop while the other ranks sleep: each segment is compared with the plain ones before and
after it, and the median of these ratios is what counts. Segments begin after a warm-up, so that nothing of start-up is in them. A third
kind of segment, the plain loop on all ranks at once, says what company alone costs on the machine: no layout can be below it but by chance.

CPU-seconds are user + system of all threads of a rank: what the kernel copies for a collective is in them, waiting is not. Peak memory
is how much the resident set of a rank grew, from before the model to the end of the warm-up; ``growth`` takes it without what the
allocator keeps, in steps that nobody times.
"""

import ctypes
import gc
import logging
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from figures import Cost, now, since
from torch import Tensor

from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.model.loss import IGNORE_INDEX, token_losses
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.seeding import materialise
from lightning_3d.strategy import ThreeDStrategy

Batch = dict[str, Tensor]
BATCHES = 8  # of random tokens, used in turn
LEARNING_RATE, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 0.1
M_MMAP_THRESHOLD, SMALL_NBYTES = -3, 65536  # mallopt's number for the size from which on a block is mapped on its own


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how long; every field is an option of the command line."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 688
    vocabulary: int = 2048
    sequence: int = 256
    micro_batch: int = 2
    accumulation: int = 4
    clip: float = 1.0  # 0 leaves clipping out
    warmup: int = 3  # steps
    steps: int = 2  # of a segment
    segments: int = 16

    @property
    def llama(self) -> LlamaConfig:
        """The model's shape."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.sequence,
        )

    @property
    def segment_tokens(self) -> int:
        """Tokens of one replica's segment."""
        return self.steps * self.micro_batch * self.accumulation * self.sequence

    def batches(self, replica: int = 0) -> Iterator[Batch]:
        """Random tokens without end, other ones for each replica."""
        generator = torch.Generator().manual_seed(replica)
        shape = (self.micro_batch * self.accumulation, self.sequence + 1)
        ids = [torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(BATCHES)]
        while True:
            yield from ({"input_ids": x[:, :-1], "labels": x[:, 1:]} for x in ids)


class PlainLoop:
    """The strategy's model, loss, optimizer, clipping and microbatches, as one writes them without it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        with torch.device("meta"):
            self.model = LlamaStage(setting.llama, range(setting.layers), first=True, last=True)
        materialise(self.model, 42, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        self.batches = setting.batches()
        self._take(setting.warmup)

    def segment(self) -> Cost:
        """Train a segment and take the time."""
        start = now()
        self._take(self.setting.steps)
        return since(start)

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            self._step(next(self.batches))

    def _step(self, batch: Batch) -> None:
        tokens = (batch["labels"] != IGNORE_INDEX).sum()
        self.optimizer.zero_grad()
        size = self.setting.micro_batch
        for ids, labels in zip(batch["input_ids"].split(size), batch["labels"].split(size), strict=True):
            nll, _ = token_losses(self.model(ids), labels)
            (nll.sum() / tokens).backward()
        if self.setting.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        self.optimizer.step()


@dataclass
class Costs:
    """The segments of one rank in their order; ``alone`` only on rank 0, and one longer, for the plain loop is first and last."""

    ours: list[Cost] = field(default_factory=list)
    alone: list[Cost] = field(default_factory=list)
    at_once: list[Cost] = field(default_factory=list)
    peak_nbytes: int = 0
    warmup_s: float = 0.0


class TakeTurns(pl.Callback):
    """After the warm-up: segments of the plain loop on rank 0, of it on all ranks at once, of the Trainer, and so on."""

    def __init__(self, setting: Setting, *, company: bool = True) -> None:
        self.setting, self.company, self.costs = setting, company, Costs()
        self._base_nbytes = forget_peak()
        self._loop: PlainLoop | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """The warm-up begins."""
        self._start = now()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A segment of the Trainer ends here, and the next one begins."""
        done = batch_idx + 1 - self.setting.warmup
        if done < 0 or done % self.setting.steps:
            return
        if done:
            self.costs.ours.append(since(self._start))
        else:
            self.costs.peak_nbytes = peak_nbytes() - self._base_nbytes
            self.costs.warmup_s = since(self._start).wall_s
        self._others()
        self._start = now()

    def _others(self) -> None:
        self._loop = self._loop or PlainLoop(self.setting)
        dist.barrier()
        if dist.get_rank() == 0:
            self.costs.alone.append(self._loop.segment())
        dist.barrier()
        if self.company and dist.get_world_size() > 1:
            self.costs.at_once.append(self._loop.segment())
            dist.barrier()


class Replica:
    """Batches of this rank's replica; iterated when the strategy knows its mesh."""

    def __init__(self, setting: Setting, strategy: ThreeDStrategy) -> None:
        self.setting, self.strategy = setting, strategy

    def __iter__(self) -> Iterator[Batch]:
        return self.setting.batches(self.strategy.mesh.coord.dp)


def fit(setting: Setting, layout: dict[str, Any], *, company: bool = True) -> Costs:
    """Train in a layout and in the plain loop by turns; on every rank of a process group, or on one process without.

    Without ``company`` the plain loop never runs on all ranks at once.
    """
    quiet()
    turns = TakeTurns(setting, company=company)
    strategy = ThreeDStrategy(batch_accumulation_per_replica=setting.accumulation, **layout)
    steps = setting.warmup + setting.steps * setting.segments
    trainer = bare_trainer(strategy, max_steps=steps, gradient_clip_val=setting.clip or None, callbacks=[turns])
    optim = AdamW(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY, lr_decay_style="constant")
    trainer.fit(LlamaModule(setting.llama, optim), Replica(setting, strategy))
    return turns.costs


def growth(setting: Setting, layout: dict[str, Any], loss_chunks: int = 1) -> int:
    """Train some steps and give the most bytes held at one time; on every rank of a pool, which may call it again.

    Large tensors are mapped one by one and given back at once, so that the resident set is what is held. By default glibc keeps what
    was freed, 1.2 to 1.8 times as much in one run, and more after several.
    """
    quiet()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, SMALL_NBYTES)
        gc.collect()
        libc.malloc_trim(0)
    strategy = ThreeDStrategy(batch_accumulation_per_replica=setting.accumulation, **layout)
    trainer = bare_trainer(strategy, max_steps=setting.steps)
    base = forget_peak()
    module = LlamaModule(setting.llama, AdamW(lr_decay_style="constant"), loss_chunks=loss_chunks)
    trainer.fit(module, Replica(setting, strategy))
    return peak_nbytes() - base


def bare_trainer(strategy: ThreeDStrategy, **options: Any) -> pl.Trainer:
    """On CPUs, on every rank of a process group or on one process without, and with nothing that is not measured."""
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def options(parser: ArgumentParser, argv: list[str] | None, sizes: Mapping[str, int] | None = None) -> tuple[Namespace, Setting]:
    """A benchmark's own options, and the setting, every field of which is an option; ``sizes`` are defaults of this benchmark."""
    for each in fields(Setting):
        default = (sizes or {}).get(each.name, each.default)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=default)
    parsed = parser.parse_args(argv)
    return parsed, Setting(**{each.name: getattr(parsed, each.name) for each in fields(Setting)})


def quiet() -> None:
    """Leave the screen to the table."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_3d"):
        logging.getLogger(name).setLevel(logging.ERROR)


def forget_peak() -> int:
    """Forget the peak of the resident set, and give its present size in bytes (0 where the system does not tell)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_nbytes()


def peak_nbytes() -> int:
    """Peak of the resident set since ``forget_peak`` (0 where the system does not tell)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
