"""Weights of a Hugging Face Llama folder (`config.json` and safetensors, one file or shards with an index), read tensor by tensor.

The names differ by a prefix only: theirs put all but the head under `model.`. Nothing is read until it is asked for, so a rank that
holds one stage reads that stage's tensors and no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig


def to_hf_name(name: str) -> str:
    """Hugging Face's name of our parameter: `layers.0.mlp.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def from_hf_name(name: str) -> str:
    """Our name of Hugging Face's parameter: `model.norm.weight` -> `norm.weight`."""
    return name.removeprefix("model.")


def read_hf_config(folder: str | Path) -> LlamaConfig:
    """The model's shape, from `config.json`.

    Raises:
        ConfigError: the file is missing, is no JSON, or describes a model that this Llama is not.
    """
    path = Path(folder) / "config.json"
    try:
        return LlamaConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face Llama.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON ({error}).") from None


def read_hf_weights(folder: str | Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters asked for, under our names, file by file, one tensor in memory at a time.

    Raises:
        ConfigError: the folder holds no safetensors, or not all of the parameters.
    """
    from safetensors import safe_open

    files, names = _files_by_name(Path(folder)), sorted(names)
    missing = [name for name in names if name not in files]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of the model's parameters, {missing[0]} among them; does its config.json fit?")
    for path in sorted({files[name] for name in names}):
        with safe_open(path, framework="pt") as file:
            for name in names:
                if files[name] == path:
                    yield name, file.get_tensor(to_hf_name(name))


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Which file holds each of our parameters."""
    from safetensors import safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {from_hf_name(name): folder / file for name, file in weight_map.items()}
    if not single.exists():
        raise ConfigError(f"{folder} holds neither {single.name} nor {index.name}; give the folder of a Hugging Face Llama.")
    with safe_open(single, framework="pt") as file:
        return {from_hf_name(name): single for name in file.keys()}  # noqa: SIM118 (not a dict)
