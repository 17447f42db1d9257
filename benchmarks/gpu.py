"""One CUDA GPU, at most 6 minutes: a Llama of 1B and one of 8B's shape with fewer layers, in bf16, against a plain loop of the same model.

    python benchmarks/gpu.py [--budget-s 330 --steps 20]      (without a GPU: --smoke, which is about the script and not about speed)

Prints a table and writes benchmarks/results/gpu.json: tokens/s, MFU (attention counted in full), peak memory, and tokens/s as a multiple of
the plain loop's, which runs first and last. What does not fit into the time is left out, and said to be.
"""

import gc
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from figures import write
from measure import Batch, quiet
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_3d.callbacks.peak import peak_flops_per_s
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.model.loss import token_losses
from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.float8 import CAPABILITY, Float8
from lightning_3d.seeding import materialise
from lightning_3d.strategy import ThreeDStrategy

LLAMA_3 = LlamaConfig(128256, 4096, 14336, 4, 32, 8, max_position_embeddings=4096, rope_theta=500000.0)
MODELS = {"8B, 4 layers": LLAMA_3, "1B": replace(LLAMA_3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)}
SMOKE = {"toy": LlamaConfig(64, 32, 48, 2, 4, 2, max_position_embeddings=16)}
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True)
class Variant:
    """Options of strategy and model."""

    strategy: dict[str, Any]
    model: dict[str, Any]
    needs: str | None = None  # why it cannot run here


@dataclass(frozen=True)
class Bench:
    """How long, on what, and of which size."""

    device: torch.device
    warmup: int
    steps: int
    rows: int  # sequences in a microbatch
    accumulation: int

    def batches(self, llama: LlamaConfig) -> Iterator[Batch]:
        """Random tokens without end."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows * self.accumulation, llama.max_position_embeddings + 1)
        while True:
            ids = torch.randint(0, llama.vocab_size, shape, generator=generator)
            yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def now_s(self) -> float:
        """The clock, once the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def tokens(self, llama: LlamaConfig) -> int:
        """Tokens of all measured steps."""
        return self.steps * self.rows * self.accumulation * llama.max_position_embeddings


def variants(*, smoke: bool) -> dict[str, Variant]:
    """What is compared with the plain loop; toy runs take the parts that need no compiler and no GPU."""
    compile_with: Any = "eager" if smoke else True
    old = not smoke and torch.cuda.get_device_capability() < CAPABILITY
    no_torchao = None if find_spec("torchao") else "torchao is not installed"
    no_flash = None if find_spec("flash_attn") and not smoke else "flash-attn is not installed"
    float8 = {"compile": compile_with, "float8": Float8(emulate=smoke)}
    return {
        "eager": Variant({}, {}),
        "eager, loss in 8 chunks": Variant({}, {"loss_chunks": 8}),
        "compiled": Variant({"compile": compile_with}, {}),
        "compiled, float8": Variant(float8, {}, "the GPU has no float8" if old else no_torchao),
        "compiled, flash_attn": Variant({"compile": compile_with}, {"attn_implementation": "flash_attn"}, no_flash),
    }


def plain(bench: Bench, llama: LlamaConfig) -> float:
    """Seconds of the measured steps of a loop as one writes it."""
    with torch.device("meta"):
        model = LlamaStage(llama, range(llama.num_hidden_layers), first=True, last=True)
    materialise(model, 42, bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    batches, start_s = bench.batches(llama), 0.0
    for step in range(bench.warmup + bench.steps):
        if step == bench.warmup:
            start_s = bench.now_s()
        batch = {key: value.to(bench.device) for key, value in next(batches).items()}
        optimizer.zero_grad()
        for ids, labels in zip(*(batch[key].split(bench.rows) for key in ("input_ids", "labels")), strict=True):
            with torch.autocast(bench.device.type, torch.bfloat16):
                nll: Tensor = token_losses(model(ids), labels)[0]
            (nll.sum() / batch["labels"].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return bench.now_s() - start_s


class Clock(pl.Callback):
    """Seconds of the steps after the warm-up."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.start_s, self.passed_s = bench, 0.0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        if batch_idx == self.bench.warmup:
            self.start_s = self.bench.now_s()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop it."""
        self.passed_s = self.bench.now_s() - self.start_s


def fit(bench: Bench, llama: LlamaConfig, variant: Variant) -> float:
    """Seconds of the measured steps under the strategy."""
    clock, attention = Clock(bench), variant.model.get("attn_implementation", "sdpa")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="gpu" if bench.device.type == "cuda" else "cpu",
        devices=1,
        strategy=ThreeDStrategy(batch_accumulation_per_replica=bench.accumulation, **variant.strategy),
        precision="bf16-mixed",
        max_steps=bench.warmup + bench.steps,
        gradient_clip_val=CLIP,
        callbacks=[clock],
        use_distributed_sampler=False,
        **options,  # type: ignore[arg-type]
    )
    optim = AdamW(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY, lr_decay_style="constant")
    module = LlamaModule(replace(llama, attn_implementation=attention), optim, loss_chunks=variant.model.get("loss_chunks", 1))
    trainer.fit(module, bench.batches(llama))
    return clock.passed_s


def measured(bench: Bench, llama: LlamaConfig, run: Callable[[], float]) -> dict[str, float | None]:
    """Tokens/s, MFU and peak memory of one run, after which all its memory is free again."""
    cuda = bench.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tokens_per_s = bench.tokens(llama) / run()
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    peak = peak_flops_per_s(bench.device)
    flops = llama.flops_per_token(llama.max_position_embeddings, causal=False)
    return {"tokens_per_s": tokens_per_s, "mfu": peak and tokens_per_s * flops / peak, "peak_gib": peak_gib}


def compare(bench: Bench, llama: LlamaConfig, until_s: float, *, smoke: bool) -> dict[str, Any]:
    """The rows of one model: the plain loop, the variants, the plain loop again."""
    rows: dict[str, Any] = {"plain loop": measured(bench, llama, lambda: plain(bench, llama))}
    for name, variant in variants(smoke=smoke).items():
        late = "no time is left" if time.perf_counter() > until_s else None
        if reason := variant.needs or late:
            rows[name] = {"left_out": reason}
        else:
            rows[name] = measured(bench, llama, lambda variant=variant: fit(bench, llama, variant))  # type: ignore[misc]
    rows["plain loop, again"] = measured(bench, llama, lambda: plain(bench, llama))
    usual = (rows["plain loop"]["tokens_per_s"] + rows["plain loop, again"]["tokens_per_s"]) / 2
    return {name: row | ({"ratio": row["tokens_per_s"] / usual} if "tokens_per_s" in row else {}) for name, row in rows.items()}


def show(model: str, rows: dict[str, Any]) -> None:
    table = Table(model, "tokens/s", "MFU", "peak, GiB", "of the plain loop's")
    for name, row in rows.items():
        if "left_out" in row:
            table.add_row(name, f"left out: {row['left_out']}")
            continue
        mfu, peak = (text.format(row[key]) if row[key] else "" for key, text in (("mfu", "{:.1%}"), ("peak_gib", "{:.1f}")))
        table.add_row(name, f"{row['tokens_per_s']:,.0f}", mfu, peak, f"{row['ratio']:.2f}")
    Console(width=100).print(table)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/gpu.json")
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds after which no variant is begun; shared out to the models")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, on the CPU")
    parsed = parser.parse_args(argv)
    if not parsed.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device is there: --smoke runs toy sizes on the CPU")
    quiet()
    smoke, models = parsed.smoke, SMOKE if parsed.smoke else MODELS
    bench = Bench(torch.device("cpu" if smoke else "cuda"), warmup=3, steps=parsed.steps, rows=2, accumulation=2)
    start_s, results = time.perf_counter(), {}
    for number, (name, llama) in enumerate(models.items(), 1):
        results[name] = compare(bench, llama, start_s + parsed.budget_s * number / len(models), smoke=smoke)
        show(name, results[name])
    gpu = {} if smoke else {"gpu": torch.cuda.get_device_name()}
    setting = {key: str(value) for key, value in asdict(bench).items()} | gpu
    write(parsed.output, results, setting | {name: asdict(llama) for name, llama in models.items()})


if __name__ == "__main__":
    main()
