"""What the benchmarks share: a Llama, its plain PyTorch loop, and a Trainer that takes turns with that loop.

Machines are noisy, and two processes at once slow each other down. So one ``fit`` is cut into short segments of a few steps, and between
two of them rank 0 runs as many steps of the plain loop while the other ranks sleep: each segment is compared with the two plain ones
around it, and the median of these ratios is what counts. Segments begin after a warm-up, so that nothing of start-up is in them.

CPU-seconds are user + system of all threads of the rank (what the kernel copies for a collective is in them, waiting is not). Peak
memory is how much the resident set of the dearest rank grew, from before the model to the end of the warm-up.
"""

import json
import logging
import platform
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
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
    steps: int = 4  # of a segment
    segments: int = 12

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
    def step_tokens(self) -> int:
        """Tokens of one replica's step."""
        return self.micro_batch * self.accumulation * self.sequence

    def batches(self, replica: int = 0) -> Iterator[Batch]:
        """Random tokens without end, other ones for each replica."""
        generator = torch.Generator().manual_seed(replica)
        shape = (self.micro_batch * self.accumulation, self.sequence + 1)
        ids = [torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(BATCHES)]
        while True:
            yield from ({"input_ids": x[:, :-1], "labels": x[:, 1:]} for x in ids)


@dataclass(frozen=True)
class Segment:
    """What one stretch of steps took on one rank."""

    wall_s: float
    cpu_s: float


class PlainLoop:
    """The same model, loss, optimizer and microbatches as the strategy's, as one writes them without it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        with torch.device("meta"):
            self.model = LlamaStage(setting.llama, range(setting.layers), first=True, last=True)
        materialise(self.model, 42, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.batches = setting.batches()

    def run(self, steps: int) -> Segment:
        """Train and take the time."""
        start = now()
        for _ in range(steps):
            self.step(next(self.batches))
        return since(start)

    def step(self, batch: Batch) -> None:
        """One optimizer step."""
        tokens = (batch["labels"] != IGNORE_INDEX).sum()
        self.optimizer.zero_grad()
        size = self.setting.micro_batch
        for ids, labels in zip(batch["input_ids"].split(size), batch["labels"].split(size), strict=True):
            nll, _ = token_losses(self.model(ids), labels)
            (nll.sum() / tokens).backward()
        if self.setting.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        self.optimizer.step()


class TakeTurns(pl.Callback):
    """After the warm-up: a segment of the plain loop, then one of the Trainer, and so on; a plain one ends it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.plain: list[Segment] = []
        self.ours: list[Segment] = []
        self.peak_nbytes = 0
        self._loop: PlainLoop | None = None
        self._base_nbytes = reset_peak()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The segment of the Trainer ends here, and the next begins when the plain loop has run."""
        done = batch_idx + 1 - self.setting.warmup
        if done < 0 or done % self.setting.steps:
            return
        if done:
            self.ours.append(since(self._start))
        else:
            self.peak_nbytes = peak_nbytes() - self._base_nbytes
        dist.barrier()
        if dist.get_rank() == 0:
            self._run_plain()
        dist.barrier()
        self._start = now()

    def _run_plain(self) -> None:
        if self._loop is None:
            self._loop = PlainLoop(self.setting)
            self._loop.run(self.setting.warmup)
        self.plain.append(self._loop.run(self.setting.steps))


class Replica:
    """Batches of this rank's replica; iterated when the strategy knows its mesh."""

    def __init__(self, setting: Setting, strategy: ThreeDStrategy) -> None:
        self.setting, self.strategy = setting, strategy

    def __iter__(self) -> Iterator[Batch]:
        return self.setting.batches(self.strategy.mesh.coord.dp)


def fit(setting: Setting, layout: dict[str, Any]) -> TakeTurns:
    """Train in a layout and in the plain loop by turns; on every rank of a process group."""
    quiet()
    turns = TakeTurns(setting)
    strategy = ThreeDStrategy(batch_accumulation_per_replica=setting.accumulation, **layout)
    devices = dist.get_world_size() if dist.is_initialized() else 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=setting.warmup + setting.steps * setting.segments,
        gradient_clip_val=setting.clip or None,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(LlamaModule(setting.llama, AdamW(lr_decay_style="constant")), Replica(setting, strategy))
    return turns


# ---- numbers -------------------------------------------------------------------------------------------------------------


def now() -> Segment:
    """Clocks of this process."""
    return Segment(time.perf_counter(), time.process_time())


def since(start: Segment) -> Segment:
    """What has passed on the clocks."""
    end = now()
    return Segment(end.wall_s - start.wall_s, end.cpu_s - start.cpu_s)


def reset_peak() -> int:
    """Forget the peak of the resident set, and give the present size in bytes (0 where the system does not tell)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_nbytes()


def peak_nbytes() -> int:
    """Peak of the resident set since ``reset_peak``."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def against_neighbours(ours: list[float], plain: list[float]) -> list[float]:
    """Each of ours divided by the mean of the plain segments before and after it."""
    return [2 * value / (before + after) for value, before, after in zip(ours, plain, plain[1:], strict=False)]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"low": low, "median": middle, "high": high}


# ---- command line --------------------------------------------------------------------------------------------------------


def parse(parser: ArgumentParser, argv: list[str] | None, default_output: str) -> Namespace:
    """Options of a benchmark: its own, and every field of the setting."""
    for field in fields(Setting):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--output", type=Path, default=Path(default_output), help="where to write the figures as JSON")
    options = parser.parse_args(argv)
    options.setting = Setting(**{field.name: getattr(options, field.name) for field in fields(Setting)})
    return options


def write(path: Path, results: Any, **more: Any) -> None:
    """The figures with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine(), **more, "results": results}, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    import os

    return {"cpu": model, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "torch": torch.__version__}


def quiet() -> None:
    """Leave the screen to the table."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def as_dict(setting: Setting) -> dict[str, Any]:
    """For JSON."""
    return asdict(setting)
