"""`python -m lightning_3d generate MODEL --prompt TEXT`: see what a model has learned.

MODEL is a checkpoint of a run, whatever its layout, or a Hugging Face folder. One process, with a cache of keys and values; the text
appears as it is made. Chosen greedily it is what `transformers` would make of the same weights.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from tokenizers.decoders import DecodeStream
from torch import Tensor

from lightning_3d.checkpoint.weights import CheckpointWeights
from lightning_3d.data.tokenizer import TextTokenizer, load_tokenizer
from lightning_3d.errors import ConfigError
from lightning_3d.model.cache import Decoder
from lightning_3d.model.hf import HFWeights, read_token_ids
from lightning_3d.model.llama import LlamaStage
from lightning_3d.seeding import fill

Choose = Callable[[Float[Tensor, "V"]], int]


def generate(
    model: str,
    *,
    prompt: str | None = None,
    prompt_ids: str | None = None,
    max_new_tokens: int = 64,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    tokenizer: str | None = None,
    special_tokens: bool | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device: str | None = None,
) -> None:
    """Print a prompt and how the model goes on, token by token.

    Args:
        model: a checkpoint, a folder of checkpoints (the newest whole one), or a Hugging Face folder.
        prompt: text to go on with; empty: from the beginning of a document.
        prompt_ids: token ids instead, `1,2,3`, for which no tokenizer is needed.
        max_new_tokens: fewer where the end-of-text token comes first, or the model's longest sequence ends.
        greedy: take the most likely token each time.
        temperature: below 1 makes the likely likelier.
        top_k: choose among so many of the most likely tokens.
        top_p: choose among the most likely tokens that have this probability together.
        seed: of the choices; null: others each time.
        tokenizer: tokenizer.json, or folder with a tokenizer; null takes the folder's, or the one that the run knows.
        special_tokens: begin the prompt as the tokenizer begins texts (BOS); null: for a Hugging Face folder only, as `prepare` does not.
        dtype: to compute in; null: that of the weights.
        device: null: cuda where there is one, else cpu.

    Raises:
        ConfigError: no model, no tokenizer, a prompt that is too long, or a number out of range.
    """
    choose = sampler(greedy=greedy, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    source = Source.open(model, tokenizer)
    ids = _numbers(prompt_ids) if prompt_ids is not None else source.encode(prompt, special_tokens)
    room = _room(source, ids, max_new_tokens)
    llama = source.load(device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype)
    _show(source, ids, stream(Decoder(llama, len(ids) + room).read, ids, choose, room, source.ends))


@dataclass(frozen=True)
class Source:
    """A model's weights, how its text is written, and which tokens end it."""

    weights: HFWeights | CheckpointWeights
    tokenizer: TextTokenizer | None
    begins: list[int]  # what a text begins with where nothing is given
    ends: set[int]

    @classmethod
    def open(cls, path: str, tokenizer: str | None = None) -> "Source":
        """A Hugging Face folder, or a checkpoint.

        Raises:
            ConfigError: it is neither, or the tokenizer given cannot be read.
        """
        if not (Path(path) / "config.json").is_file():
            checkpoint = CheckpointWeights(path)
            known = tokenizer or checkpoint.tokenizer
            loaded = load_tokenizer(known) if known else None
            ends = [loaded.eos_token_id] if loaded and loaded.eos_token_id is not None else []
            return cls(checkpoint, loaded, ends, set(ends))
        folder = Path(path)
        weights = HFWeights(folder)
        known = tokenizer or (path if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")) else None)
        ids = read_token_ids(folder)
        ends = _as_list(ids["eos_token_id"])
        begins = _as_list(ids["bos_token_id"]) or ends[:1]
        return cls(weights, load_tokenizer(known) if known else None, begins, set(ends))

    def encode(self, prompt: str | None, special_tokens: bool | None) -> list[int]:
        """The prompt's token ids.

        Raises:
            ConfigError: there is no prompt, or no tokenizer.
        """
        if prompt is None:
            raise ConfigError("prompt: null: give a text to go on with, or prompt_ids")
        if self.tokenizer is None:
            raise ConfigError(f"tokenizer: null: {self.weights.folder} names none that is here: give its path, or prompt_ids for a prompt")
        special = isinstance(self.weights, HFWeights) if special_tokens is None else special_tokens
        ids = self.tokenizer.backend.encode(prompt, add_special_tokens=special).ids or self.begins
        if not ids:
            raise ConfigError("prompt: it is empty, and the tokenizer names no token that begins or ends a text: give a text")
        return ids

    def load(self, device: str, dtype: str | None = None) -> LlamaStage:
        """The whole model, on one device."""
        config = self.weights.config
        own = self.weights.dtype("norm.weight")
        with torch.device("meta"):
            model = LlamaStage(config, range(config.num_hidden_layers), first=True, last=True).to(getattr(torch, dtype) if dtype else own)
        if isinstance(self.weights, HFWeights):
            fill(model, torch.device(device), self.weights.read)
        else:
            model.to_empty(device=device)
            self.weights.read_into({name: parameter.detach() for name, parameter in model.named_parameters()})
        return model.eval()


def sampler(
    *, greedy: bool = False, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> Choose:
    """How a token is chosen by its logits; a seed makes the same choices on every device.

    Raises:
        ConfigError: a number out of range.
    """
    for key, value, is_good, range_ in (
        ("temperature", temperature, temperature > 0, "greater than 0; for the most likely tokens set greedy"),
        ("top_k", top_k, top_k is None or top_k > 0, "at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "greater than 0 and at most 1"),
    ):
        if not is_good:
            raise ConfigError(f"{key}: {value} must be {range_}")
    if greedy:
        return lambda logits: int(logits.argmax())
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return lambda logits: int(
        torch.multinomial(keep_likely(logits.float().cpu() / temperature, top_k, top_p).softmax(-1), 1, generator=generator)
    )


def keep_likely(logits: Float[Tensor, "V"], top_k: int | None = None, top_p: float | None = None) -> Float[Tensor, "V"]:
    """The logits with minus infinity for tokens that are not to be chosen: not among the k, then not in the nucleus."""
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort()
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        unlikely[-1] = False
        logits = logits.masked_fill(torch.empty_like(unlikely).scatter_(0, order, unlikely), -torch.inf)
    return logits


def stream(
    read: Callable[[list[int]], Float[Tensor, "V"]], ids: list[int], choose: Choose, max_new_tokens: int, ends: Collection[int] = ()
) -> Iterator[int]:
    """The tokens that follow, up to and with one that ends the text; ``read`` gives the logits after all that it was given."""
    piece = ids
    for _ in range(max_new_tokens):
        token = choose(read(piece))
        yield token
        if token in ends:
            return
        piece = [token]


def _numbers(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").strip("[] ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise ConfigError(f"prompt_ids: {text!r} must be token ids: 1,2,3")
    return ids


def _room(source: Source, ids: list[int], max_new_tokens: int) -> int:
    """How many tokens can follow."""
    config = source.weights.config
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: {max_new_tokens} must be at least 1")
    if max(ids) >= config.vocab_size or min(ids) < 0:
        raise ConfigError(
            f"prompt: it has the token id {max(ids)}, but the model's vocab_size is {config.vocab_size}: name its own tokenizer"
        )
    left = config.max_position_embeddings - len(ids)
    if left < 1:
        raise ConfigError(
            f"prompt: {len(ids)} tokens leave no room in the model's max_position_embeddings={config.max_position_embeddings}: shorten it"
        )
    return min(left, max_new_tokens)


def _show(source: Source, ids: list[int], tokens: Iterator[int]) -> None:
    """Print text as it comes, and at the end how fast it came (the first token, with the prompt, not counted)."""
    writer = _Writer(source.tokenizer)
    begin = end = time.perf_counter()
    new = 0
    for token in ids:
        writer.write(token)
    for new, token in enumerate(tokens, 1):
        writer.write(token)
        end = time.perf_counter()
        begin = end if new == 1 else begin
    writer.close()
    speed = f", {(new - 1) / (end - begin):,.1f} tokens/s" if new > 1 else ""
    sys.stderr.write(f"{new} tokens{speed}\n")


class _Writer:
    """Prints token by token; nothing for one that is part of a letter, until the letter is there."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._backend = tokenizer.backend if tokenizer else None
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._shown = ""

    def write(self, token: int) -> None:
        self._ids.append(token)
        self._print((self._decoder.step(self._backend, token) or "") if self._backend else f"{token} ")

    def close(self) -> None:
        if self._backend:  # the letters that were begun and not ended
            self._print(self._backend.decode(self._ids, skip_special_tokens=False)[len(self._shown) :])
        self._print("\n")

    def _print(self, text: str) -> None:
        self._shown += text
        sys.stdout.write(text)
        sys.stdout.flush()


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
