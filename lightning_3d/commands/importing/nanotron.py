"""Nanotron's YAML, in all dialects that its own examples and users' files are written in."""

import re
from typing import Any

from lightning_3d.commands.importing.source import Source

# Nanotron's names of parameters, and patterns of ours, for weight_decay_exclude_named_params.
NAMES = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": r"embed_tokens\.weight",
    "model.decoder.0.pp_block.input_layernorm.weight": r"layers\.\d+\.input_layernorm\.weight",
    "model.decoder.0.pp_block.attn.qkv_proj.weight": r"layers\.\d+\.self_attn\.[qkv]_proj\.weight",
    "model.decoder.0.pp_block.attn.o_proj.weight": r"layers\.\d+\.self_attn\.o_proj\.weight",
    "model.decoder.0.pp_block.post_attention_layernorm.weight": r"layers\.\d+\.post_attention_layernorm\.weight",
    "model.decoder.0.pp_block.mlp.gate_up_proj.weight": r"layers\.\d+\.mlp\.(gate|up)_proj\.weight",
    "model.decoder.0.pp_block.mlp.down_proj.weight": r"layers\.\d+\.mlp\.down_proj\.weight",
    "model.final_layer_norm.pp_block.weight": r"norm\.weight",
    "model.lm_head.pp_block.weight": r"lm_head\.weight",
}
SHAPE = {  # Nanotron's defaults where a file says nothing
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
LEFT_OUT = {
    "general.project": "name the project in a logger: trainer.logger",
    "general.step": "a checkpoint has its own",
    "general.consumed_train_samples": "a checkpoint has its own",
    "general.benchmark_csv_path": "Throughput logs the same numbers",
    "general.ignore_sanity_checks": "checks are always made",
    "parallelism.tp_linear_async_communication": "no such overlap here; same numbers",
    "parallelism.tp_recompute_allgather": "the gathered input is kept; same numbers",
    "model.ddp_bucket_cap_mb": "buckets have a size of their own",
    "model.make_vocab_size_divisible_by": "a vocabulary needs no padding here: tp may cut it unevenly",
    "tokenizer.tokenizer_revision": "Nanotron does not use it",
    "tokenizer.tokenizer_max_length": "Nanotron does not use it",
    "checkpoints.save_final_state": "the last step is always saved",
    "checkpoints.load_lr_scheduler": "--ckpt_path resumes all of it",
    "checkpoints.load_optimizer": "--ckpt_path resumes all of it",
    "checkpoints.no_load_optim": "--ckpt_path resumes all of it",
    "checkpoints.checkpoints_path_is_shared_file_system": "checkpoints are on a shared file system or in an object store",
    "logging.log_level": "warnings are shown, and what rank 0 has to say",
    "logging.log_level_replica": "warnings are shown",
    "metrics_logging": "GradNorm and Throughput log each what they know",
    "tokens.val_check_interval": "Nanotron does not validate; here trainer.val_check_interval does, with data.validation_folder",
    "tokens.limit_val_batches": "without effect in Nanotron",
    "tokens.limit_test_batches": "without effect in Nanotron",
    "profiler": "use trainer.profiler",
    "lighteval": "evaluate what `export` writes",
    "s3_upload": "give an address as checkpoints_path: s3://bucket/run",
}


def nanotron(source: Source) -> dict[str, Any]:
    """Our recipe; what has no counterpart is noted or refused in ``source``."""
    model, strategy = _model(source), _strategy(source)
    steps, interval = source.take("tokens.train_steps"), source.take("checkpoints.checkpoint_interval")
    model["optim"] = _optimizer(source)
    clip = source.take("optimizer.clip_grad")
    seed = source.take("general.seed", default=42)
    run = re.sub(r"_?%(date|jobid)", "", str(source.take("general.run", default=""))) or "nanotron"
    every = source.take("logging.iteration_step_info_interval", default=1)
    folder = source.take("checkpoints.checkpoints_path", default=f"runs/{run}/checkpoints")
    initial = bool(source.take("checkpoints.save_initial_state", default=False))
    source.only(
        "checkpoints.resume_checkpoint_path",
        because="its checkpoints cannot be read: convert to Hugging Face's form, and give model.init_from",
    )
    data = _data(source)
    if data.get("class_path") == "lightning_3d.SyntheticDataModule":
        data["init_args"]["vocab_size"] = model["llama"]["vocab_size"]
    if steps is None:
        source.refuse("tokens.train_steps: it is missing")
    saver = {"checkpoints_path": str(folder), "checkpoint_interval": interval or 1000, "save_initial_state": initial}
    precision = _precision(source)
    source.leave_out(LEFT_OUT)
    return {
        "seed_everything": seed,
        "model": {**model, "init_seed": seed},
        "data": data,
        "trainer": {
            "accelerator": "auto",
            "devices": _product(strategy),
            "precision": precision,
            "max_steps": steps,
            "max_epochs": -1,
            "gradient_clip_val": clip,
            "log_every_n_steps": every,
            "strategy": strategy,
            "callbacks": callbacks(saver),
            "default_root_dir": f"runs/{run}",
        },
    }


def callbacks(saver: dict[str, Any]) -> list[Any]:
    """What every recipe has."""
    return ["GradNorm", "Throughput", "lightning_3d.ProgressBar", "Summary", {"class_path": "lightning_3d.Checkpoint", "init_args": saver}]


def _product(strategy: dict[str, Any]) -> int:
    return int(strategy["dp"] * strategy["tp"] * strategy["pp"] * strategy.get("cp", 1))


def _model(source: Source) -> dict[str, Any]:
    at = "model.model_config"
    for key in ("is_qwen2_config", "is_starcoder2_config"):
        source.only(f"{at}.{key}", False, because="only Llamas can be imported")
    source.only(f"{at}.moe_config", because="there are no experts here")
    source.only(f"{at}.is_llama_config", True, because="only Llamas can be imported")
    source.only(f"{at}.hidden_act", "silu", because="only silu is there")
    for key in ("rope_interleaved", "interleaved_rotary"):
        source.only(f"{at}.{key}", False, because="rotary pairs are halves here (i with i + H/2), as in Hugging Face's Llamas")
    llama = {key: source.take(f"{at}.{key}", default=default) for key, default in SHAPE.items()}
    if llama["vocab_size"] == -1:
        source.refuse(f"{at}.vocab_size: -1: give the number")
    source.only(f"{at}._attn_implementation", "sdpa", "flash_attention_2", because="choose sdpa")
    reason = "unused in Nanotron, or of the tokenizer"
    keys = ("initializer_range", "pretraining_tp", "rope_scaling", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
    source.leave_out({f"{at}.{key}": reason for key in keys})
    std = source.take("model.init_method.std", default=0.025)
    scaling = str(source.take("model.init_method.scaling_method", default="NUM_LAYERS"))
    if scaling.upper() != "NONE":
        source.note(f"model.init_method.scaling_method: {scaling}: o_proj and down_proj start with the same std as all others here")
    source.only("model.init_method.use_mup", False, because="there is no muP here")
    source.only("model.init_method.path", because="its checkpoints cannot be read: give model.init_from a Hugging Face folder")
    enabled = source.take(f"{at}.z_loss_enabled", default=False)
    coefficient = source.take(f"{at}.z_loss_coefficient", default=1e-4)
    return {"llama": {**llama, "initializer_range": std}, "z_loss_coefficient": coefficient if enabled else 0.0}


def _strategy(source: Source) -> dict[str, Any]:
    at = "parallelism"
    sizes = {key: source.take(f"{at}.{key}", default=1) for key in ("dp", "tp", "pp")}
    cp = source.take(f"{at}.context_parallel_size", default=1)
    source.only(f"{at}.expert_parallel_size", 1, because="there are no experts here")
    source.only(f"{at}.moe_layer_recompute", False, because="there are no experts here")
    engine = str(source.take(f"{at}.pp_engine", default="afab"))
    sequence = str(source.take(f"{at}.tp_mode", default="ALL_REDUCE")).upper() == "REDUCE_SCATTER"
    granularity = str(source.take(f"{at}.recompute_granularity", default="none")).lower()
    recompute = "full" if source.take(f"{at}.recompute_layer", default=False) else granularity
    zero = source.take("optimizer.zero_stage", default=0)
    mode = "zero2" if zero and sizes["dp"] > 1 else "ddp"
    if mode == "zero2":
        source.note(f"optimizer.zero_stage: {zero}: data_parallel: zero2 is the nearest, which shards gradients too")
    strategy: dict[str, Any] = {**sizes, **({"cp": cp} if cp > 1 else {}), "pp_engine": engine}
    return strategy | {"sequence_parallel": sequence and sizes["tp"] > 1, "data_parallel": mode, "recompute": recompute}


def _precision(source: Source) -> str:
    dtype, wide = str(source.take("model.dtype", default="bfloat16")), source.take("optimizer.accumulate_grad_in_fp32", default=True)
    if dtype == "bfloat16":
        if wide:
            source.note("model.dtype: bfloat16 with float32 accumulation: precision: bf16-mixed, whose weights are float32")
        return "bf16-mixed" if wide else "bf16-true"
    if dtype != "float32":
        source.refuse(f"model.dtype: {dtype!r}: choose bfloat16 or float32")
    return "32-true"


def _optimizer(source: Source) -> dict[str, Any]:
    """Adam's settings, which older files have directly under ``optimizer``."""
    source.only("optimizer.optimizer_factory.name", "adamW", because="only adamW is there")
    adam = {
        key: source.take(f"optimizer.optimizer_factory.{key}", f"optimizer.{key}", default=default)
        for key, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_eps", 1e-8))
    }
    fused = source.take("optimizer.optimizer_factory.torch_adam_is_fused", "optimizer.torch_adam_is_fused", default=True)
    at = "optimizer.learning_rate_scheduler"
    rate = source.take(f"{at}.learning_rate")
    if rate is None:
        source.refuse(f"{at}.learning_rate: it is missing")
    optim = {"learning_rate": rate, **adam, "fused": fused, "weight_decay": source.take("optimizer.weight_decay", default=0.0)}
    optim["weight_decay_exclude_named_params"] = _excluded(source)
    defaults = {"lr_warmup_steps": 0, "lr_warmup_style": "linear", "lr_decay_style": "linear", "lr_decay_steps": None}
    optim |= {key: source.take(f"{at}.{key}", default=default) for key, default in defaults.items()}
    optim["lr_decay_starting_step"] = source.take(f"{at}.lr_decay_starting_step")
    optim["min_decay_lr"] = source.take(f"{at}.min_decay_lr", default=rate)
    return optim


def _excluded(source: Source) -> list[str]:
    """The same parameters by our names; Nanotron's patterns match from the beginning of its own."""
    ours: list[str] = []
    for pattern in source.take("optimizer.weight_decay_exclude_named_params", default=[]):
        matched = [our for name, our in NAMES.items() if re.match(pattern, name)]
        if not matched:
            source.note(f"optimizer.weight_decay_exclude_named_params: {pattern!r} matches no weight")
        ours += [our for our in matched if our not in ours]
    return ours


def _data(source: Source) -> dict[str, Any]:
    sizes = {
        key: source.take(f"tokens.{key}", default=1) for key in ("sequence_length", "micro_batch_size", "batch_accumulation_per_replica")
    }
    stages = source.take("data_stages") or [{"start_training_step": 1, "data": source.take("data") or {}}]
    first, *later = [_Stage(source, number, stage) for number, stage in enumerate(stages)]
    tokenizer = source.take("tokenizer.tokenizer_name_or_path")
    if first.text is not None:
        if later:
            source.refuse("data_stages: text that is tokenised while training has one stage: `prepare` it")
        return {
            "class_path": "lightning_3d.TextDataModule",
            "init_args": {**first.text, "tokenizer": tokenizer, **sizes, "num_workers": 1, "seed": first.seed},
        }
    if first.is_dummy:
        return {"class_path": "lightning_3d.SyntheticDataModule", "init_args": sizes}
    if tokenizer:
        source.note(f"tokenizer.tokenizer_name_or_path: {tokenizer!r}: the Nanosets name theirs")
    seeds = {stage.seed for stage in later} - {first.seed}
    if seeds:
        source.note(f"data_stages: seeds {sorted(seeds)} of later stages: one seed orders all of them here, {first.seed}")
    length = first.length or sizes.pop("sequence_length")
    data = {**first.folders, **sizes, "sequence_length": length, "num_workers": first.workers, "seed": first.seed}
    return data | ({"data_stages": [stage.as_later for stage in later]} if later else {})


class _Stage:
    """One of ``data_stages``."""

    def __init__(self, source: Source, number: int, stage: dict[str, Any]) -> None:
        content = Source(stage, f"data_stages[{number}]")
        content.take("name")
        self.start = content.take("start_training_step", default=1)
        self.length = content.take("sequence_length")
        self.seed = content.take("data.seed", default=42)
        self.workers = content.take("data.num_loading_workers", default=1)
        for key in ("sft_dataloader", "debug_max_samples"):
            content.only(f"data.dataset.{key}", False, because="there is no fine-tuning on conversations here")
        self.text = _text(content)
        self.folders = _folders(content)
        self.is_dummy = self.text is None and not self.folders
        reason = "read from the data, or of Nanotron's own readers"
        keys = ("dataset_read_path", "tokenizer_name", "vocab_size", "token_size_in_bytes", "return_positions", "skip_in_stream")
        more = ("pad_samples_to_global_batch_size", "dataset_max_tokens", "shuffle_files", "use_old_brrr_dataloader")
        content.leave_out({f"data.dataset.{key}": reason for key in (*keys, *more)})
        content.take("data.dataset")
        source.absorb(content)

    @property
    def as_later(self) -> dict[str, Any]:
        """As one of ``data.data_stages``."""
        return {"start_training_step": self.start, **self.folders, **({"sequence_length": self.length} if self.length else {})}


def _text(content: Source) -> dict[str, Any] | None:
    at = "data.dataset"
    dataset = content.take(f"{at}.hf_dataset_or_datasets")
    if dataset is None:
        return None
    if not isinstance(dataset, str):
        content.refuse(f"{at}.hf_dataset_or_datasets: {dataset!r}: one data set, or `prepare` them")
    keys = ("dataset_processing_num_proc_per_process", "dataset_overwrite_cache")
    content.leave_out({f"{at}.{key}": "text is tokenised while training" for key in keys})
    split = content.take(f"{at}.hf_dataset_splits", default="train")
    return {
        "dataset": dataset,
        "split": split,
        "config": content.take(f"{at}.hf_dataset_config_name"),
        "text_column": content.take(f"{at}.text_column_name", default="text"),
    }


def _folders(content: Source) -> dict[str, Any]:
    """Nanosets and their weights: a list, a mapping of older files, or one; without weights Nanotron takes equal ones."""
    at = "data.dataset"
    folders: Any = content.take(f"{at}.dataset_folder", f"{at}.dataset_path")
    weights = content.take(f"{at}.dataset_weights")
    if isinstance(folders, dict):
        folders, weights = list(folders), list(folders.values())
    if folders is None or isinstance(folders, str) or len(folders) == 1:
        one = folders if folders is None or isinstance(folders, str) else folders[0]
        return {} if one is None else {"dataset_folder": one}
    return {"dataset_folder": list(folders), "dataset_weights": weights or [1 / len(folders)] * len(folders)}
