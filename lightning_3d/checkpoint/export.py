"""`python -m lightning_3d export CHECKPOINT OUTPUT`: a checkpoint as a Hugging Face folder.

One process, no GPU, and memory for one file of the output: shards are read, written and freed one after the other, so that a
model larger than memory can be exported. The folder is written beside and renamed: it is there once it is whole.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_3d.checkpoint.weights import CheckpointWeights
from lightning_3d.data.tokenizer import load_tokenizer
from lightning_3d.errors import ConfigError
from lightning_3d.model.hf import read_token_ids, to_hf_config, to_hf_name

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export(
    checkpoint: str,
    output: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_nbytes: int = 5_000_000_000,
    tokenizer: str | None = None,
) -> None:
    """Write a checkpoint's weights as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        checkpoint: folder of a checkpoint, or of several: the newest whole one.
        output: folder to write; it must not be there yet.
        dtype: of the weights in the output; null keeps the checkpoint's, bit by bit.
        max_shard_nbytes: the largest file, and about the memory that is needed; a larger tensor gets a file of its own.
        tokenizer: tokenizer.json, or folder with a tokenizer, to put beside; null takes the one that the run knows.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is missing, cut off or altered.
        ConfigError: no whole checkpoint of a Llama, a folder that is there already, no room, or a tokenizer that does not fit.
    """
    weights, folder = CheckpointWeights(checkpoint), Path(output)
    wanted = getattr(torch, dtype) if dtype else None
    shards = _split(weights, wanted, max_shard_nbytes)
    known = tokenizer or weights.tokenizer
    ids = _token_ids(weights, known)
    place = _begin(folder, sum(_nbytes(weights, name, wanted) for names in shards for name in names))
    _write_shards(weights, shards, wanted, place)
    _write_json(place / "config.json", to_hf_config(weights.config, wanted or weights.dtype(weights.names[0]), **ids))
    _write_json(place / "generation_config.json", {"_from_model_config": True, **ids})
    if known:
        _copy_tokenizer(Path(known), place)
    _finish(place, folder)
    said = (
        f"with the tokenizer {known}"
        if known
        else "without a tokenizer, since the run names none that is here: give --tokenizer to add one"
    )
    print(f"{weights.folder} -> {folder}, {said}")


def _split(weights: CheckpointWeights, dtype: torch.dtype | None, max_shard_nbytes: int) -> list[list[str]]:
    """Names for each file, in the model's order."""
    shards: list[list[str]] = []
    left = 0
    for name in weights.names:
        nbytes = _nbytes(weights, name, dtype)
        if not shards or nbytes > left:
            shards.append([])
            left = max_shard_nbytes
        shards[-1].append(name)
        left -= nbytes
    return shards


def _nbytes(weights: CheckpointWeights, name: str, dtype: torch.dtype | None) -> int:
    return torch.Size(weights.shape(name)).numel() * (dtype or weights.dtype(name)).itemsize


def _begin(folder: Path, nbytes: int) -> Path:
    """An empty folder beside, on a disk with room."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"output: {folder} is there already: name a new folder, or remove it")
    place = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be written ({error}): name another") from None
    free = shutil.disk_usage(place).free
    if free < nbytes:
        place.rmdir()
        raise ConfigError(f"output: {folder} needs {nbytes:,} bytes, but its disk has {free:,} left: make room, or name another")
    return place


def _write_shards(weights: CheckpointWeights, shards: list[list[str]], dtype: torch.dtype | None, place: Path) -> None:
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {name: torch.empty(weights.shape(name), dtype=dtype or weights.dtype(name)) for name in names}
        weights.read_into(tensors)
        save_file({to_hf_name(name): tensor for name, tensor in tensors.items()}, place / file, metadata={"format": "pt"})
        (place / file).chmod(place.stat().st_mode & 0o666)  # it was made for its owner alone
        weight_map |= {to_hf_name(name): file for name in names}
    if len(shards) > 1:  # as transformers does it
        total = sum(_nbytes(weights, name, dtype) for names in shards for name in names)
        _write_json(place / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _token_ids(weights: CheckpointWeights, tokenizer: str | None) -> dict[str, Any]:
    """What begins and ends a text: as in the folder that the run began from, else by the tokenizer; `prepare` sets no BOS."""
    origin = weights.settings.get("init_from")
    ids = read_token_ids(Path(origin)) if origin else {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is None:
        return ids
    loaded, vocab_size = load_tokenizer(tokenizer), weights.config.vocab_size
    if loaded.vocab_size > vocab_size:
        raise ConfigError(f"tokenizer: {tokenizer} has {loaded.vocab_size} ids, but the model's vocab_size is {vocab_size}: name its own")
    return ids if ids["eos_token_id"] is not None else ids | {"eos_token_id": loaded.eos_token_id}


def _copy_tokenizer(source: Path, place: Path) -> None:
    """The files of a folder, or a tokenizer.json and the file that describes it."""
    folder = source if source.is_dir() else source.parent
    for name in TOKENIZER_FILES:
        file = source if source.is_file() and name == "tokenizer.json" else folder / name
        if file.is_file() and (source.is_dir() or name in TOKENIZER_FILES[:2]):
            shutil.copyfile(file, place / name)
    if not (place / "tokenizer_config.json").exists():
        _write_json(place / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _finish(place: Path, folder: Path) -> None:
    """To the disk, and visible."""
    for path in (*place.iterdir(), place):
        _sync(path)
    place.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
