"""Hugging Face Llama folders (`config.json` and safetensors, one file or shards with an index), read piece by piece.

The names differ by a prefix only: theirs put all but the head under `model.`. Nothing is read until it is asked for, so a rank that
holds part of one stage reads that part and no more.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import ROPE_SCALING_KEYS, LlamaConfig, rope_type
from lightning_3d.model.llama import LlamaStage

_NO_MATHEMATICS = ("attn_implementation", "initializer_range", "max_position_embeddings")


def to_hf_name(name: str) -> str:
    """Hugging Face's name of our parameter: `layers.0.mlp.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def from_hf_name(name: str) -> str:
    """Our name of Hugging Face's parameter: `model.norm.weight` -> `norm.weight`."""
    return name.removeprefix("model.")


def to_hf_config(config: LlamaConfig, dtype: torch.dtype, **token_ids: Any) -> dict[str, Any]:
    """The content of a `config.json`, in the form that versions 4 and 5 of transformers read; token ids that it would assume are given."""
    shape = asdict(config) | {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    del shape["attn_implementation"]
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": str(dtype).removeprefix("torch.")}
    return kind | shape | {"attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None} | token_ids


def read_hf_config(folder: str | Path) -> LlamaConfig:
    """The model's shape, from `config.json`.

    Raises:
        ConfigError: the file is missing, is no JSON, or describes a model that this Llama is not.
    """
    path = Path(folder) / "config.json"
    content = read_hf_json(path)
    if content is None:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face Llama.")
    try:
        return LlamaConfig.from_hf(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def read_hf_json(path: Path) -> dict[str, Any] | None:
    """A JSON file, or None where there is none.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}).") from None


def read_token_ids(folder: Path) -> dict[str, Any]:
    """What begins and what ends a text, an id or several: `bos_token_id`, `eos_token_id`; `generation_config.json` knows best."""
    said = [read_hf_json(folder / name) or {} for name in ("generation_config.json", "config.json")]
    return {key: next((file[key] for file in said if file.get(key) is not None), None) for key in ("bos_token_id", "eos_token_id")}


def whole_names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of a Llama, from the embedding to the head."""
    with torch.device("meta"):
        model = LlamaStage(replace(config, attn_implementation="sdpa"), range(config.num_hidden_layers), first=True, last=True)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class HFWeights:
    """The weights of a folder, under our names.

    Args:
        folder: holds `config.json` and safetensors.

    Raises:
        ConfigError: it holds no safetensors, or not exactly the parameters of the Llama of its `config.json`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.config = Path(folder), read_hf_config(folder)
        self._files = _files_by_name(self.folder)
        self._check_parameters()

    def check_agrees(self, config: LlamaConfig, key: str, shape_key: str) -> None:
        """Whether the folder's model computes what one of this shape computes.

        Raises:
            ConfigError: it does not; ``key`` and ``shape_key`` are what the user calls the folder and the shape.
        """
        theirs, ours = _mathematics(self.config), _mathematics(config)
        for name, value in theirs.items():
            if ours[name] != value:
                raise ConfigError(
                    f"{shape_key}.{name}: {ours[name]} is not that of {key}: {self.folder}, whose config.json has {value}: "
                    f"set {shape_key}.{name} to {value}, or leave {shape_key} out to take it from the folder"
                )

    def dtype(self, name: str) -> torch.dtype:
        """In which the folder holds a parameter."""
        return self.read(name, (slice(0, 1),)).dtype

    def read(self, name: str, region: tuple[slice, ...] = (slice(None),)) -> Float[Tensor, "..."]:
        """Part of a parameter, in the dtype of the file.

        Raises:
            ConfigError: a model that is more than a Llama has a parameter that the folder lacks.
        """
        if name not in self._files:
            raise ConfigError(f"{self.folder} lacks {name}: it holds a Llama, and the model is more")
        with _open(self._files[name]) as file:
            return file.get_slice(to_hf_name(name))[region]

    def _check_parameters(self) -> None:
        wanted = whole_names(self.config)
        held = {name for name in self._files if not name.endswith(".rotary_emb.inv_freq")}
        if self.config.tie_word_embeddings:
            held.discard("lm_head.weight")  # some files repeat the embedding
        missing, over = [name for name in wanted if name not in held], sorted(held - wanted.keys())
        if missing:
            raise ConfigError(
                f"{self.folder} lacks {len(missing)} of the model's parameters, {missing[0]} among them; does its config.json fit?"
            )
        if over:
            raise ConfigError(f"{self.folder} holds {over[0]}, which a Llama of its config.json lacks; does its config.json fit?")
        for name, shape in _shapes(self._files).items():
            if name in wanted and shape != wanted[name]:
                raise ConfigError(f"{self.folder}: {name} has shape {shape}, by its config.json {wanted[name]}.")


def read_hf_weights(folder: str | Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters asked for, under our names, file by file, one tensor in memory at a time.

    Raises:
        ConfigError: the folder holds no safetensors, or not all of the parameters.
    """
    files, names = _files_by_name(Path(folder)), sorted(names)
    missing = [name for name in names if name not in files]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of the model's parameters, {missing[0]} among them; does its config.json fit?")
    for path in sorted({files[name] for name in names}):
        with _open(path) as file:
            for name in names:
                if files[name] == path:
                    yield name, file.get_tensor(to_hf_name(name))


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Which file holds each of our parameters."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {from_hf_name(name): folder / file for name, file in weight_map.items()}
    if not single.exists():
        raise ConfigError(f"{folder} holds neither {single.name} nor {index.name}; give the folder of a Hugging Face Llama.")
    with _open(single) as file:
        return {from_hf_name(name): single for name in file.keys()}  # noqa: SIM118 (not a dict)


def _shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the heads of the files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with _open(path) as file:
            shapes |= {name: tuple(file.get_slice(to_hf_name(name)).get_shape()) for name in files if files[name] == path}
    return shapes


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist, though the folder's index names it; download it again.") from None
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again.") from None


def _mathematics(config: LlamaConfig) -> dict[str, Any]:
    """What decides which numbers the weights give; what may be left out, spelt out."""
    scaling = config.rope_scaling
    if scaling is not None:
        kind = rope_type(scaling)
        scaling = {"rope_type": kind} | {key: scaling[key] for key in ROPE_SCALING_KEYS[kind]} if kind != "default" else None
    values = asdict(config) | {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "rope_scaling": scaling}
    return {name: value for name, value in values.items() if name not in _NO_MATHEMATICS}
