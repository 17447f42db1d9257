"""TorchTitan's TOML of 0.1 and 0.2; later versions are configured in Python."""

from typing import Any

from lightning_3d.commands.importing.nanotron import callbacks
from lightning_3d.commands.importing.source import Source

_LLAMA3 = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
FLAVORS: dict[str, dict[str, Any]] = {  # torchtitan/models/llama3 of 0.2; ffn sizes as they come out of its multiples
    "debugmodel": {
        **_LLAMA3,
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "8B": {
        **_LLAMA3,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70B": {
        **_LLAMA3,
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "405B": {
        **_LLAMA3,
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
}
SCHEDULES = {  # -> our name, and stages on a rank
    "GPipe": ("afab", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved_1f1b", 2),
    "LoopedBFS": ("looped_bfs", 2),
    "InterleavedZeroBubble": ("zero_bubble", 2),
    "ZBVZeroBubble": ("zbv", 2),
    "DualPipeV": ("dualpipe_v", 2),
}
TEXTS = {"c4": ("allenai/c4", "en"), "c4_test": (None, None), "c4_validation": ("allenai/c4", "en")}
DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
SECTIONS = ("parallelism", "training", "experimental")  # where the degrees are, newest first
LEFT_OUT = {
    "job.description": "a description",
    "job.print_args": "--print_config shows the settings",
    "profiling": "use trainer.profiler",
    "metrics.enable_tensorboard": "TensorBoard is Lightning's default logger",
    "metrics.save_tb_folder": "logs are in trainer.default_root_dir",
    "metrics.enable_wandb": "name WandbLogger in trainer.logger",
    "metrics.disable_color_printing": "the progress bar's matter",
    "quantize": "float8 is for the linears of blocks, without an all-gather of its own",
    "float8": "float8 is for the linears of blocks, without an all-gather of its own",
    "optimizer.implementation": "the fused kernel is the default; same numbers",
    "optimizer.fused": "the fused kernel is the default; same numbers",
    "training.mixed_precision_reduce": "gradients are added up in the dtype of the weights",
    "training.gc_freq": "garbage is collected as Python does",
    "parallelism.disable_loss_parallel": "the loss is always computed where the logits are",
    "training.disable_loss_parallel": "the loss is always computed where the logits are",
    "parallelism.pipeline_parallel_first_stage_less_layers": "layers are split by what they cost, or by model.stage_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers": "layers are split by what they cost, or by model.stage_layers",
    "parallelism.pipeline_parallel_layers_per_stage": "layers are split by what they cost, or by model.stage_layers",
    "checkpoint.export_dtype": "`export` writes other formats",
    "checkpoint.last_save_model_only": "the last checkpoint is whole: training can go on",
    "checkpoint.load_step": "--ckpt_path names a step's folder",
    "compile.components": "each block is compiled; the loss is not",
    "validation": "give data.validation_dataset and trainer.val_check_interval",
}


def torchtitan(source: Source) -> dict[str, Any]:
    """Our recipe; what has no counterpart is noted or refused in ``source``."""
    length = source.take("training.seq_len", default=2048)
    llama, steps = _llama(source, length), source.take("training.steps", default=10000)
    seed = source.take("debug.seed", "training.seed", default=42)
    deterministic = bool(source.take("debug.deterministic", "training.deterministic", default=False))
    folder = source.take("job.dump_folder", default="./outputs")
    strategy, has_pipeline = _strategy(source)
    data = _data(source, length, has_pipeline)
    optim = _optimizer(source, steps)
    clip = source.take("training.max_norm", default=1.0)
    trainer: dict[str, Any] = {
        "accelerator": "auto",
        "devices": "auto",
        "precision": _precision(source),
        "max_steps": steps,
        "max_epochs": -1,
        "gradient_clip_val": clip,
        "log_every_n_steps": source.take("metrics.log_freq", default=10),
        "deterministic": deterministic,
        "strategy": strategy,
    }
    trainer |= _checkpoints(source, folder, strategy) | {"default_root_dir": folder}
    source.leave_out(LEFT_OUT)
    return {"seed_everything": seed, "model": {"llama": llama, "optim": optim, "init_seed": seed}, "data": data, "trainer": trainer}


def _llama(source: Source, length: int) -> dict[str, Any]:
    source.only("model.name", "llama3", because="only llama3 can be imported")
    source.only("model.norm_type", "rmsnorm", because="only rmsnorm is there")
    flavor = source.take("model.flavor", default="debugmodel")
    if flavor not in FLAVORS:
        source.refuse(f"model.flavor: {flavor!r}: choose from {list(FLAVORS)}")
    if flavor == "debugmodel":
        source.note("model.flavor: debugmodel: its shape as of TorchTitan 0.2; vocab_size must hold the tokenizer's ids")
    source.note("initial weights: drawn with one standard deviation, initializer_range, where TorchTitan's depends on the depth")
    return FLAVORS.get(str(flavor), FLAVORS["debugmodel"]) | {"max_position_embeddings": length}


def _degree(source: Source, name: str, default: int = 1) -> int:
    return int(source.take(*(f"{section}.{name}" for section in SECTIONS), default=default))


def _strategy(source: Source) -> tuple[dict[str, Any], bool]:
    tp, pp, cp = (_degree(source, f"{axis}_parallel_degree") for axis in ("tensor", "pipeline", "context"))
    replicate, shard = _degree(source, "data_parallel_replicate_degree"), _degree(source, "data_parallel_shard_degree", -1)
    if _degree(source, "expert_parallel_degree") > 1:
        source.refuse("parallelism.expert_parallel_degree: there are no experts here")
    reshard = source.take("parallelism.fsdp_reshard_after_forward", default="default")
    sharded = "zero2" if reshard == "never" else "fsdp"
    mode = "ddp" if shard == 1 else "hsdp" if replicate > 1 else sharded
    dp: int | str = "auto" if shard < 1 else replicate * shard
    strategy: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "data_parallel": mode, "sequence_parallel": tp > 1}
    strategy |= {"dp_replicate": replicate} if mode == "hsdp" else {}
    rotate = source.take("parallelism.context_parallel_rotate_method", "experimental.context_parallel_rotate_method", default="allgather")
    strategy |= {"cp": cp, "cp_method": "allgather" if rotate == "allgather" else "ring"} if cp > 1 else {}
    names = [f"{section}.pipeline_parallel_schedule" for section in SECTIONS]
    schedule = str(source.take(*names, default="1F1B"))
    if schedule not in SCHEDULES:
        source.refuse(f"parallelism.pipeline_parallel_schedule: {schedule!r}: choose from {list(SCHEDULES)}")
    engine, stages = SCHEDULES.get(schedule, ("1f1b", 1))
    if pp > 1:
        strategy |= {"pp_engine": engine, "virtual_stages": stages}
    strategy["recompute"] = _recompute(source)
    strategy |= {"cpu_offload": True} if source.take("training.enable_cpu_offload", default=False) else {}
    strategy |= _float8(source)
    strategy["compile"] = bool(source.take("compile.enable", "training.compile", default=False))
    overlaps = source.take("parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel", default=False)
    strategy |= {"async_tensor_parallel": True} if overlaps and tp > 1 else {}
    timeouts = {"comm.train_timeout_seconds": "timeout_s", "comm.init_timeout_seconds": "first_step_timeout_s"}
    return strategy | {ours: float(value) for key, ours in timeouts.items() if (value := source.take(key)) is not None}, pp > 1


def _float8(source: Source) -> dict[str, Any]:
    converters = source.take("model.converters", default=[])
    recipe = source.take("quantize.linear.float8.recipe_name", "float8.recipe_name", default="tensorwise")
    emulate = bool(source.take("quantize.linear.float8.emulate", "float8.emulate", default=False))
    if others := [name for name in converters if name != "float8"]:
        source.refuse(f"model.converters: {others}: only float8 is there")
    if recipe not in ("tensorwise", "rowwise"):
        source.refuse(f"quantize.linear.float8.recipe_name: {recipe!r}: choose tensorwise or rowwise")
    return {"float8": {"recipe": recipe} | ({"emulate": True} if emulate else {})} if "float8" in converters else {}


def _recompute(source: Source) -> str | int:
    mode = source.take("activation_checkpoint.mode", default="selective")
    option = str(source.take("activation_checkpoint.selective_ac_option", default="2"))
    if mode == "selective":
        return int(option) if option.isdigit() else "selective"
    if mode not in ("none", "full"):
        source.refuse(f"activation_checkpoint.mode: {mode!r}: choose none, selective or full")
    return str(mode)


def _optimizer(source: Source, steps: int) -> dict[str, Any]:
    source.only("optimizer.name", "AdamW", because="only AdamW is there")
    source.only("optimizer.early_step_in_backward", False, because="the optimizer steps once all gradients are reduced")
    rate = float(source.take("optimizer.lr", default=8e-4))
    warmup = int(source.take("lr_scheduler.warmup_steps", "training.warmup_steps", default=200))
    total = int(source.take("lr_scheduler.total_steps", default=steps))
    ratio, kind = source.take("lr_scheduler.decay_ratio"), source.take("lr_scheduler.decay_type", default="linear")
    if kind not in DECAYS:
        source.refuse(f"lr_scheduler.decay_type: {kind!r}: choose from {list(DECAYS)}")
    decay = total - warmup if ratio is None else round(total * ratio)
    least = source.take("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min", default=0.0)
    return {
        "learning_rate": rate,
        "adam_beta1": source.take("optimizer.beta1", default=0.9),
        "adam_beta2": source.take("optimizer.beta2", default=0.95),
        "adam_eps": source.take("optimizer.eps", default=1e-8),
        "weight_decay": source.take("optimizer.weight_decay", default=0.1),
        "lr_warmup_steps": warmup,
        "lr_decay_style": DECAYS.get(str(kind), "linear"),
        "lr_decay_steps": max(1, min(decay, total - warmup)),
        "lr_decay_starting_step": max(warmup, total - decay),
        "min_decay_lr": rate * least,
    }


def _data(source: Source, length: int, has_pipeline: bool) -> dict[str, Any]:
    rows = source.take("training.local_batch_size", "training.batch_size", default=8)
    whole, micro = (
        source.take("training.global_batch_size", default=-1),
        source.take("parallelism.pipeline_parallel_microbatch_size", default=1),
    )
    name, path = source.take("training.dataset", default="c4_test"), source.take("training.dataset_path")
    tokenizer = source.take("model.hf_assets_path", "model.tokenizer_path", default="./assets/hf/Llama-3.1-8B")
    size = micro if has_pipeline else rows
    batch = {"global_batch_samples": whole} if whole > 0 else {"batch_accumulation_per_replica": max(1, rows // size)}
    hub, config = TEXTS.get(str(name), (name, None))
    if path is None and hub is None:
        source.note(f"training.dataset: {name!r} is a file of TorchTitan's tests: allenai/c4 stands for it")
        hub, config = TEXTS["c4"]
    text = {"dataset": path or hub, "config": None if path else config, "streaming": path is None, "tokenizer": tokenizer}
    sizes = {"sequence_length": length, "micro_batch_size": size, **batch, "num_workers": 1}
    return {"class_path": "lightning_3d.TextDataModule", "init_args": text | sizes}


def _precision(source: Source) -> str:
    dtype = source.take("training.mixed_precision_param", default="bfloat16")
    if dtype not in ("bfloat16", "float32"):
        source.refuse(f"training.mixed_precision_param: {dtype!r}: choose bfloat16 or float32")
    return "bf16-mixed" if dtype == "bfloat16" else "32-true"


def _checkpoints(source: Source, folder: str, strategy: dict[str, Any]) -> dict[str, Any]:
    enabled = source.take("checkpoint.enable", "checkpoint.enable_checkpoint", default=False)
    name, interval = source.take("checkpoint.folder", default="checkpoint"), source.take("checkpoint.interval", default=500)
    kept = source.take("checkpoint.keep_latest_k", default=10)
    strategy["async_checkpoint"] = source.take("checkpoint.async_mode", default="disabled") != "disabled" and bool(enabled)
    source.only("checkpoint.initial_load_path", "", because="its checkpoints cannot be read: give model.init_from a Hugging Face folder")
    if not enabled:
        return {"enable_checkpointing": False, "callbacks": callbacks({})[:-1]}
    saver = {"checkpoints_path": f"{folder}/{name}", "checkpoint_interval": interval, "keep_last": kept or None}
    return {"callbacks": callbacks(saver)}
