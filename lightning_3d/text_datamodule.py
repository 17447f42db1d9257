"""Text without preparing it: a data module that tokenises and packs while it trains.

Each dp coord packs the documents that are its own, so that where it stands is a place in its own stream, and a checkpoint holds one place
for each coord. The places come with the batches, and the one that is saved is that of the last batch trained on by Lightning's own
count, whatever was read ahead. For how a fit is resumed in Lightning 2.6, see datamodule.py.

A Nanoset takes time to prepare, and has a global order, resumes with any dp, and is read at the speed of the disk; this takes 1.2 to 1.3
times the tokenizer's own time in every run (measured on 3 KB documents, dp 1 to 8: 3 million tokens a second and process).
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_3d.data.batches import Batch
from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.packing import PackedBatches, Packer, Place, Row, batch_of
from lightning_3d.data.text import Source, open_text
from lightning_3d.data.tokenizer import load_tokenizer
from lightning_3d.data.workers import outlive_sigterm, short_errors
from lightning_3d.errors import ConfigError
from lightning_3d.replica_data import ReplicaDataModule, require_at_least


class TextDataModule(ReplicaDataModule):
    """Batches {"input_ids", "labels"} of shape (micro_batch_size * batch_accumulation_per_replica, sequence_length).

    Args:
        dataset: text to train on: .jsonl, .parquet or .txt files (a document a line, a row, a file) or patterns of them; a folder that
            `save_to_disk` wrote; the name of a dataset on the hub; or, in Python, a map-style dataset or stream of `datasets`.
        tokenizer: a tokenizer.json, or a folder with a tokenizer.
        sequence_length: tokens a sample.
        micro_batch_size: samples a microbatch.
        batch_accumulation_per_replica: microbatches a batch, on each data-parallel replica; null: 1.
        global_batch_samples: samples a batch over all replicas, instead.
        config: which configuration of a dataset on the hub.
        split: which part of it.
        streaming: read while training, in the order of the files, and keep no copy; else shuffled, a new order each epoch.
        text_column: column or key of the text.
        eos_token: behind each document, where the tokenizer does not name it.
        mask_documents: attention within documents only: adds "position_ids", which restart with each document, and masks the labels
            that are the first of a document.
        validation_dataset: text for validation, test and predict, given like `dataset`.
        validation_split: which part of it, where it has several.
        validation_samples: its first so many samples, the same in every layout; fewer if there are not as many.
        num_workers: 1 reads, tokenises and packs in a process of its own, 0 in the trainer's.
        seed: of the order; each epoch has another.

    Raises:
        ConfigError: a size is out of range; a dataset or the tokenizer cannot be read; text for less than one sample.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: str,
        sequence_length: int,
        micro_batch_size: int = 1,
        batch_accumulation_per_replica: int | None = None,
        global_batch_samples: int | None = None,
        config: str | None = None,
        split: str = "train",
        streaming: bool = False,
        text_column: str = "text",
        eos_token: str | None = None,
        mask_documents: bool = False,
        validation_dataset: Any = None,
        validation_split: str = "validation",
        validation_samples: int = 100,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__()
        require_at_least(1, sequence_length=sequence_length, validation_samples=validation_samples)
        self.set_batch(micro_batch_size, batch_accumulation_per_replica, global_batch_samples)
        if num_workers not in (0, 1):
            raise ConfigError(f"data.num_workers is {num_workers!r}: give 0 or 1, since the order is that of one reader")
        self.sequence_length, self.sequence_lengths = sequence_length, [sequence_length]
        self.mask_documents, self.validation_samples, self.num_workers, self.seed = mask_documents, validation_samples, num_workers, seed
        self.tokenizer = load_tokenizer(tokenizer, eos_token)
        self.tokenizer_path = os.path.abspath(tokenizer) if os.path.exists(tokenizer) else tokenizer
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"data.eos_token: {tokenizer} names no end-of-document token: name one of its tokens")
        self.train_source = self._open("dataset", dataset, config, split, streaming, text_column, seed)
        self.validation_source = None
        if validation_dataset is not None:
            self.validation_source = self._open(
                "validation_dataset", validation_dataset, config, validation_split, streaming, text_column, None
            )
        self._places = {0: Place()}  # behind so many batches

    def _open(self, key: str, dataset: Any, config: str | None, split: str, streaming: bool, column: str, seed: int | None) -> Source:
        """Open a dataset, and see that it has text for a sample."""
        try:
            source = open_text(dataset, config, split, streaming, column, seed)
            first = next(Packer(source, self.tokenizer, self.sequence_length).rows(Place(), epochs=1))
        except ConfigError as error:
            raise ConfigError(f"data.{key}: {error}") from error
        tokens = int((first.tokens != IGNORE).sum())
        if tokens <= self.sequence_length and key == "dataset":
            raise ConfigError(
                f"data.sequence_length {self.sequence_length} needs windows of {self.sequence_length + 1} tokens, "
                f"but data.{key} holds {tokens} in all: shorten it or give more data"
            )
        return source

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one Trainer batch over all data-parallel replicas."""
        return self.global_batch_samples * self.sequence_length

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a tokenizer with more ids than the model.

        Raises:
            ConfigError: its vocabulary is larger.
        """
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"data.tokenizer: {self.tokenizer.name} has {self.vocab_size} ids, but the model's vocab_size is {vocab_size}: "
                f"it must be at least {self.vocab_size}"
            )

    @override
    def setup(self, stage: str) -> None:
        """Begin, and see that all ranks read the same: each takes its part of an order that it makes up by itself.

        Raises:
            ConfigError: they do not.
        """
        self.split_over(self.replicas[1])  # under a strategy that has not done so
        if self.batches_done == 0:  # a new trainer; one that goes on with its fit keeps its place
            self._places = {0: Place()}
        streams = self._gather(self._stream())
        if odd := next((rank for rank, stream in enumerate(streams) if stream != streams[0]), 0):
            raise ConfigError(
                f"data.dataset: rank 0 has {streams[0]}, rank {odd} has {streams[odd]}: give all ranks the same files, and a seed "
                "to `shuffle` if you call it"
            )

    @override
    def train_dataloader(self) -> "TextLoader":
        length = sys.maxsize
        if (trainer := self.trainer) is not None:
            if trainer.max_steps < 0:
                raise ConfigError("trainer.max_steps is not set: text that is packed on the fly has no known number of batches; set it")
            length = trainer.max_steps * trainer.accumulate_grad_batches
        return TextLoader(self._train_batches, length)

    def _train_batches(self) -> Iterator[Batch]:
        """Yield batches from the place behind the last batch trained on, and note the place behind each."""
        done = self.batches_done
        begin = Place() if getattr(self.trainer, "overfit_batches", 0) else self._places[done]
        batches = PackedBatches(self._packer(), begin, self.rows, self.mask_documents)
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pins_memory,
            worker_init_fn=outlive_sigterm,
            generator=torch.Generator(),
        )
        for number, (batch, place) in enumerate(short_errors(loader), done + 1):
            past = self.batches_done
            self._places = {key: value for key, value in self._places.items() if key >= past} | {number: place}
            yield batch

    def _packer(self) -> Packer:
        rank, replicas = self.replicas
        return Packer(self.train_source, self.tokenizer, self.sequence_length, rank, replicas)

    @override
    def val_dataloader(self) -> "TextLoader | list[TextLoader]":
        if self.validation_source is None:
            if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
                raise ConfigError(f"data.validation_dataset is not set, but `{self.trainer.state.fn.value}` needs it: name a dataset")
            return []
        return TextLoader(self._validation_batches, -(-len(self.validation_rows) // self.global_batch_samples))

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    @cached_property
    def validation_rows(self) -> list[Row]:
        """The first samples of the validation set, all of them on every rank."""
        assert self.validation_source is not None
        rows = Packer(self.validation_source, self.tokenizer, self.sequence_length).rows(Place(), epochs=1)
        return list(islice(rows, self.validation_samples))

    def _validation_batches(self) -> Iterator[Batch]:
        """Yield this coord's part of each global batch, rows without targets where there are no more samples."""
        empty = np.zeros(self.sequence_length + 1, np.int64)
        none = Row(np.full_like(empty, IGNORE), empty, Place())
        for begin in range(0, len(self.validation_rows), self.global_batch_samples):
            first = begin + self.replicas[0] * self.rows
            rows = self.validation_rows[first : first + self.rows]
            yield batch_of(rows + [none] * (self.rows - len(rows)), self.mask_documents)

    # ---- position --------------------------------------------------------------------------------------------------------

    def _gather(self, own: Any) -> list[Any]:
        """Return what each rank has; its own alone where a rank is lost, since no checkpoint is written then.

        Communication: all_gather_object over all ranks, some hundred bytes each.
        """
        if self.trainer is None or self.trainer.world_size == 1:
            return [own]
        together = getattr(self.trainer.strategy, "together", None)
        if together is not None and not together.all_arrived():
            return [own]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return everyone

    def _stream(self) -> dict[str, Any]:
        """Return what decides which tokens stand at a place."""
        tokenizer = f"{self.tokenizer.digest()} with end {self.tokenizer.eos_token_id}"
        return {
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "tokenizer": tokenizer,
            "dataset": self.train_source.fingerprint,
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the places of all coords; Lightning calls it on every rank."""
        rank, replicas = self.replicas
        everyone = self._gather((rank, asdict(self._places[self.batches_done])))
        return {"replicas": replicas, "places": dict(everyone), "batches": self.batches_done, "stream": self._stream()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped.

        Raises:
            ConfigError: dp, seed, sequence_length, tokenizer or data are not the checkpoint's, so that its places would mean other text.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # evaluation takes the weights only
        for key, now in self._stream().items():
            if (then := state_dict["stream"][key]) != now:
                raise ConfigError(f"data.{key}: the checkpoint was trained with {then}, this run has {now}: resume with the same")
        rank, replicas = self.replicas
        if state_dict["replicas"] != replicas:
            raise ConfigError(
                f"dp={replicas}: the checkpoint was trained with dp={state_dict['replicas']}, where each replica packed documents of its "
                f"own and stands at a place that only it can go on from: resume with dp={state_dict['replicas']}, or train from the start "
                "on a Nanoset (`python -m lightning_3d prepare`), which resumes with any dp"
            )
        self._places = {state_dict["batches"]: Place(**state_dict["places"][rank])}


class TextLoader:
    """An iterable that Lightning takes as it is (a DataLoader would get another sampler), and as one that can be resumed.

    The place is kept once, by the data module.
    """

    def __init__(self, batches: Callable[[], Iterator[Batch]], length: int) -> None:
        self.batches = batches
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        return islice(self.batches(), self.length)

    def state_dict(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the place is asked for when iteration begins."""
