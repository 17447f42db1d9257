"""``python -m lightning_3d init --size 8b --gpus 64``: a recipe to begin with, in the fastest layout that the planner finds to fit."""

from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.parallel.stages import Layout
from lightning_3d.planning.estimate import Estimate
from lightning_3d.planning.gpus import GIB, find_gpu
from lightning_3d.planning.report import layout
from lightning_3d.planning.search import proposals, search
from lightning_3d.planning.setting import Setting

Size = Literal["tiny", "160m", "1b", "8b", "70b"]
_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(keys, (hidden, ffn, layers, heads, kv_heads), strict=True)) | more


SHAPES: dict[str, dict[str, Any]] = {  # those of configs/model/
    "tiny": _shape(128, 352, 2, 4, 2, vocab_size=2048, max_position_embeddings=128, initializer_range=0.08, tie_word_embeddings=True),
    "160m": _shape(768, 2048, 12, 12, 12, vocab_size=32000, max_position_embeddings=2048),
    "1b": _shape(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True, rope_scaling=_SCALING | {"factor": 32.0}, **_LLAMA3),
    "8b": _shape(4096, 14336, 32, 32, 8, rope_scaling=_SCALING, **_LLAMA3),
    "70b": _shape(8192, 28672, 80, 64, 8, rope_scaling=_SCALING, **_LLAMA3),
}
BATCHES = {"tiny": (128, 2048), "160m": (2048, 1 << 19), "1b": (4096, 1 << 19), "8b": (8192, 1 << 20), "70b": (8192, 1 << 21)}
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (Training Compute-Optimal Large Language Models)


def init(size: Size, gpus: int, output: str | None = None, gpu: str = "h100-80gb") -> None:
    """Write a recipe that can run, or print it.

    Args:
        size: of the model.
        gpus: ranks; processes, for the tiny one, which runs on CPUs.
        output: file to write, which must not be there yet; null prints.
        gpu: what each rank has.

    Raises:
        ConfigError: an unknown size or GPU, a number of ranks that no layout fits, a file that is there.
    """
    if size not in get_args(Size):
        raise ConfigError(f"size={size!r}: choose from {', '.join(get_args(Size))}")
    if gpus < 1:
        raise ConfigError(f"gpus={gpus} must be at least 1")
    if output is not None and Path(output).exists():
        raise ConfigError(f"output: {output} is there already: name another file, or remove it")
    text = recipe_text(size, proposed(size, gpus, gpu), output or "recipe.yaml")
    if output is None:
        print(text, end="")
    else:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(text)


def proposed(size: str, gpus: int, gpu: str) -> Estimate:
    """The fastest layout that fits."""
    length, tokens = BATCHES[size]
    samples = max(gpus, tokens // length)
    if samples % gpus:  # so that each rank may be a replica
        samples = -(-samples // gpus) * gpus
    on_cpu = size == "tiny"
    setting = Setting(
        Layout(ParallelDims(dp=gpus)),
        "1f1b",
        samples // gpus,
        1,
        length,
        "32-true" if on_cpu else "bf16-mixed",
        on_cpu=on_cpu,
    )
    found = search(LlamaModule(LlamaConfig(**SHAPES[size])), setting, find_gpu(gpu))
    if not found:
        proposals(found, find_gpu(gpu))
    return found[0]


def recipe_text(size: str, plan: Estimate, name: str) -> str:
    """The recipe, with comments."""
    setting, dims, plan_layout = plan.setting, plan.setting.layout.dims, plan.setting.layout
    per_node = min(dims.world_size, setting.gpus_per_node)
    nodes = -(-dims.world_size // per_node)
    command = f"python -m lightning_3d fit --config {name}"
    if nodes > 1:
        start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        command = f"{start} -m lightning_3d fit --config {name}"
    steps = max(200, round(TOKENS_PER_PARAMETER * plan.numel / setting.global_batch_tokens))
    data = "data/python_corpus" if size == "tiny" else "data/web"
    made_by = (
        "python recipes/python_corpus.py"
        if size == "tiny"
        else f"python -m lightning_3d prepare FILES --tokenizer TOKENIZER --output {data}"
    )
    strategy = {"dp": "auto", "tp": dims.tp, "pp": dims.pp, "data_parallel": plan_layout.data_parallel}
    strategy |= {"sequence_parallel": plan_layout.sequence_parallel, "recompute": plan_layout.recompute}
    strategy |= {"pp_engine": setting.engine} if dims.pp > 1 else {}
    tokens = f"{TOKENS_PER_PARAMETER} tokens a parameter; {setting.global_batch_tokens:,} tokens a step"
    rate, least = (8e-3, 8e-4) if size == "tiny" else (3e-4, 3e-5)
    return f"""# What:      a Llama of {plan.numel:,} parameters, {tokens}
# Hardware:  {dims.world_size} {"CPU processes" if setting.on_cpu else plan.gpu.name}; {layout(plan)}
# Command:   {command}
# Measured:  not yet run; planned: {plan.worst.peak.total / GIB:.1f} GiB a rank
model:
  llama: {_inline(SHAPES[size])}
  optim:  # learning_rate is the peak, after the warm-up; then a cosine to min_decay_lr
    {{learning_rate: {rate}, adam_beta2: 0.95, weight_decay: 0.1, weight_decay_exclude_named_params: [".*norm.*"],
     lr_warmup_steps: {min(2000, steps // 20)}, lr_decay_style: cosine, min_decay_lr: {least}}}
data:  # made by: {made_by}
  dataset_folder: {data}/train
  validation_folder: {data}/validation
  validation_samples: 64
  sequence_length: {setting.sequence_length}
  micro_batch_size: {setting.micro_batch_size}  # of one pass through the model
  batch_accumulation_per_replica: {setting.microbatches}  # passes a step, on each replica
  num_workers: {0 if setting.on_cpu else 2}
trainer:
  accelerator: {"cpu" if setting.on_cpu else "gpu"}
  devices: {per_node}
  num_nodes: {nodes}
  precision: {setting.precision}
  max_steps: {steps}
  max_epochs: -1
  gradient_clip_val: 1.0
  val_check_interval: {max(1, min(1000, steps // 4))}
  check_val_every_n_epoch: null
  log_every_n_steps: 10
  strategy: {_inline(strategy)}
  callbacks:
    - GradNorm
    - Throughput
    - lightning_3d.ProgressBar
    - Summary
    - class_path: lightning_3d.Checkpoint
      init_args: {{checkpoints_path: runs/{size}/checkpoints, checkpoint_interval: {min(1000, steps)}}}
  default_root_dir: runs/{size}
"""


def _inline(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, default_flow_style=True, sort_keys=False, width=10**6).strip()
