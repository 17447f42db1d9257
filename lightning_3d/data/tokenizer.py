"""A tokenizer as `prepare` needs it: text to ids, the end-of-document id, and how many ids there are.

Texts are encoded without the tokenizer's own special tokens (a BOS on every document would be one more token that nothing
predicts); `prepare` appends the end-of-document token itself, as datatrove does.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from tokenizers import Tokenizer

from lightning_3d.errors import ConfigError

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer of the `tokenizers` library with what is known about it."""

    backend: Tokenizer
    name: str
    vocab_size: int
    eos_token_id: int | None

    def encode(self, texts: list[str], append_eos: bool) -> tuple[Int64[np.ndarray, "T"], list[int]]:
        """Return the token ids of all texts back to back, and how many each has; texts without any are left out."""
        end = [self.eos_token_id] if append_eos else []
        ids: list[int | None] = []
        lengths = []
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            if len(encoding):
                ids += encoding.ids
                ids += end
                lengths.append(len(encoding) + len(end))
        return np.array(ids, np.int64), lengths

    def digest(self) -> str:
        """Tell this tokenizer from another, wherever its files lie."""
        return hashlib.blake2b(self.backend.to_str().encode(), digest_size=16).hexdigest()


def load_tokenizer(path: str, eos_token: str | None = None) -> TextTokenizer:
    """Load a tokenizer.json, a folder that holds one, a folder of a `transformers` tokenizer, or one by its name on the hub.

    Raises:
        ConfigError: nothing there can be read as a fast tokenizer, or it does not know `eos_token`.
    """
    place = Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    if not path or (not place.exists() and (path.endswith(".json") or not HUB_NAME.fullmatch(path))):
        raise ConfigError(f"tokenizer: {path} does not exist: name a tokenizer.json, a folder with a tokenizer, or one on the hub")
    backend, known_eos = _from_file(file) if file.is_file() else _from_transformers(path)
    backend.no_truncation()
    backend.no_padding()
    eos_token = eos_token or known_eos
    eos_token_id = backend.token_to_id(eos_token) if eos_token else None
    if eos_token and eos_token_id is None:
        raise ConfigError(f"eos_token: {path} has no token {eos_token!r}: name one of its tokens")
    return TextTokenizer(backend, path, max(backend.get_vocab(with_added_tokens=True).values()) + 1, eos_token_id)


def _from_file(file: Path) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer and the end-of-document token that the file beside it names."""
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer: {file} is not a tokenizer of the `tokenizers` library: {error}") from None
    config = file.with_name("tokenizer_config.json")
    try:
        eos_token = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"tokenizer: {config} is not a JSON object: {error}") from None
    return backend, eos_token["content"] if isinstance(eos_token, dict) else eos_token


def _from_transformers(path: str, local: bool = True) -> tuple[Tokenizer, str | None]:
    """Return the fast tokenizer inside a `transformers` one, and its end-of-document token; the hub is asked for what is not cached."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
        return tokenizer.backend_tokenizer, tokenizer.eos_token
    except (OSError, ValueError, AttributeError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
    if Path(path).exists():
        raise ConfigError(f"tokenizer: {path} holds neither a tokenizer.json nor a fast `transformers` tokenizer: {reason}")
    if local:
        return _from_transformers(path, local=False)
    raise ConfigError(f"tokenizer: {path} is no file or folder, and no fast tokenizer that can be had from the hub: {reason}")
