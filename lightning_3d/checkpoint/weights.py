"""The weights of a sharded checkpoint, in one process without process groups; optimizer state is not loaded.

A tensor is put together from the shards that hold parts of it, whatever layout saved them: only what is asked for is in memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint.files import Reader
from lightning_3d.checkpoint.folder import is_checkpoint, latest_checkpoint
from lightning_3d.checkpoint.loading import load_trainer_state
from lightning_3d.checkpoint.manifest import Manifest
from lightning_3d.checkpoint.store import Place, at
from lightning_3d.errors import ConfigError, DamagedCheckpointError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.hf import whole_names

_PREFIX = "model."


class CheckpointWeights:
    """The weights of a checkpoint of a ``LlamaModule``, by our names.

    Args:
        path: folder of a checkpoint, or of several: the newest whole one.

    Raises:
        DamagedCheckpointError: a file is missing, cut off or, of those that are read, altered.
        ConfigError: there is no sharded checkpoint, or not one of a Llama.
    """

    def __init__(self, path: str | Place) -> None:
        self.folder = _find(at(path))
        with _damage_named(self.folder):
            self.trainer_state = load_trainer_state(str(self.folder))
            self._reader = Reader(self.folder)
            held = self._reader.metadata.state_dict_metadata
        self.config = self._llama()
        names = {name.removeprefix(_PREFIX): value for name, value in held.items() if name.startswith(_PREFIX)}
        self._held = {name: value for name, value in names.items() if isinstance(value, TensorStorageMetadata)}
        self._check_names()

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's module was made with."""
        return dict(self.trainer_state.get("hyper_parameters", {}))

    @property
    def tokenizer(self) -> str | None:
        """Path of the tokenizer of the run's data, or of the folder that the run began from, if it is there."""
        for path in (self.trainer_state.get("tokenizer"), self.settings.get("init_from")):
            if path and (Path(path).is_file() or (Path(path) / "tokenizer.json").is_file()):
                return str(path)
        return None

    @property
    def names(self) -> list[str]:
        """From the embedding to the head."""
        return list(whole_names(self.config))

    def dtype(self, name: str) -> torch.dtype:
        """In which the checkpoint holds a parameter."""
        return self._held[name].properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole parameter."""
        return tuple(self._held[name].size)

    def read_into(self, targets: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Fill whole tensors in place, in their own dtypes.

        Raises:
            DamagedCheckpointError: what was read is not what was written.
        """
        with _damage_named(self.folder):
            self._reader.fill({_PREFIX + name: tensor for name, tensor in targets.items()})

    def _llama(self) -> LlamaConfig:
        shape = self.settings.get("llama")
        if not isinstance(shape, Mapping):
            raise ConfigError(
                f"{self.folder} holds no shape of a Llama among its hyper-parameters: it is not a checkpoint of a LlamaModule"
            )
        known = {field.name for field in fields(LlamaConfig)}
        return LlamaConfig(**{key: value for key, value in shape.items() if key in known} | {"attn_implementation": "sdpa"})

    def _check_names(self) -> None:
        for name, shape in whole_names(self.config).items():
            if name not in self._held or self.shape(name) != shape:
                held = f"as {self.shape(name)}" if name in self._held else "not"
                raise ConfigError(f"{self.folder} holds {name} {held}, by its hyper-parameters it is {shape}: is the module another model?")
        over = sorted(self._held.keys() - whole_names(self.config).keys())
        if over:
            raise ConfigError(f"{self.folder} holds {over[0]}, which a Llama lacks: its module is another model")


@contextmanager
def _damage_named(folder: Place) -> Iterator[None]:
    """Say of which checkpoint a damaged file is."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{folder} is damaged: {error}; name an older one") from None


def _find(path: Place) -> Place:
    folder = path if is_checkpoint(path) or path.is_file() else latest_checkpoint(path)
    if folder is None:
        raise ConfigError(f"{path} is no whole sharded checkpoint and holds none: name a folder step-N, or one that holds such folders")
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a checkpoint in one file, as other strategies write it: name one that was written by ThreeDStrategy"
        )
    if found := Manifest(folder).missing():
        raise DamagedCheckpointError(f"{folder} is damaged: {found}; name an older one")
    return folder
