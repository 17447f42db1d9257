"""The data module: one stream of samples, one integer to resume it.

What the trainer has trained on is counted in Lightning's own progress (batches processed), never in what loaders or workers
have fetched: a checkpoint written in `on_train_batch_end`, by validation, at the end of the run or after an exception
holds the number of samples that went into the weights it holds.

How a resumed fit finds its place in Lightning 2.6: `load_state_dict` runs before the loops' counters are restored; the loader is made
after, or before if `configure_optimizers` asks for `estimated_stepping_batches`. So positions are computed when the first batch is
asked for. Lightning adds the batches done before to its own count and stops at len(loader): the length is that of the whole run
(or pass), while iteration begins at the position. With `max_steps` and no `max_epochs` the run is one Lightning epoch,
whatever passes over the data that takes; else an epoch is one pass, and what a pass leaves over (less than one batch) begins the next.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_3d.data.batches import Batches, BatchLoader, Key
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.stages import DataStage, Stages
from lightning_3d.data.stream import InOrder, Samples, Stream
from lightning_3d.errors import ConfigError
from lightning_3d.replica_data import ReplicaDataModule, require_at_least

LOOK_AT_TOKENS = 1 << 20  # of each set, before training begins


class NanosetDataModule(ReplicaDataModule):
    """Batches {"input_ids", "labels"} of shape (micro_batch_size * batch_accumulation_per_replica, sequence_length).

    With cp > 1 and without mask_documents a rank reads only its part of the sequences that it trains on, and says which in "sequence_ids".

    Args:
        dataset_folder: Nanoset to train on, written by `prepare` or by datatrove; or a list of several.
        sequence_length: tokens a sample.
        micro_batch_size: samples a microbatch.
        batch_accumulation_per_replica: microbatches a batch, on each data-parallel replica; null: 1.
        global_batch_samples: samples a batch over all replicas, instead: the same on any number of them that divides it.
        dataset_weights: share of each folder in the samples; null: by their sizes. At every moment shares are met within one sample.
        max_epochs: refuse to read a folder more often than this; one number for all, or one (or null) for each.
        data_stages: data that takes over at later steps.
        mask_documents: attention within documents only: adds "position_ids", which restart with each document, and masks the labels
            that are the first of a document.
        eos_token_id: a document ends behind each of these tokens; null: where the folder's `.index` says.
        validation_folder: Nanoset for validation, test and predict: its samples in order, the last batch filled up with masked rows.
        validation_samples: use only so many samples of it, the same in every layout.
        num_workers: processes that read ahead; 0 reads in the trainer's.
        seed: of the order; each epoch has another.

    Raises:
        ConfigError: a size is not positive, a folder cannot be read, weights or stages contradict each other.
    """

    def __init__(
        self,
        dataset_folder: str | list[str],
        sequence_length: int,
        micro_batch_size: int = 1,
        batch_accumulation_per_replica: int | None = None,
        global_batch_samples: int | None = None,
        dataset_weights: list[float] | None = None,
        max_epochs: float | list[float | None] | None = None,
        data_stages: list[DataStage] | None = None,
        mask_documents: bool = False,
        eos_token_id: int | None = None,
        validation_folder: str | None = None,
        validation_samples: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__()
        require_at_least(1, sequence_length=sequence_length)
        require_at_least(0, num_workers=num_workers)
        if validation_samples is not None:
            require_at_least(1, validation_samples=validation_samples)
        self.set_batch(micro_batch_size, batch_accumulation_per_replica, global_batch_samples)
        self.num_workers = num_workers
        self.seed = seed
        self.sequence_length = sequence_length
        self.documents = ("index" if eos_token_id is None else eos_token_id) if mask_documents else None
        first = DataStage(1, dataset_folder, dataset_weights, None, max_epochs)
        self.stages = Stages([first, *(data_stages or [])], sequence_length, self.open_train_set, seed)
        self.validation_set: Samples | None = _open_validation_set(validation_folder, sequence_length) if validation_folder else None
        self.validation_samples = validation_samples
        self._check_tokenizers()
        self._model_vocab_size: int | None = None
        self._forget()

    def open_train_set(self, folder: str, sequence_length: int) -> Samples:
        """The samples of a folder; override for sets of another kind."""
        return Nanoset(folder, sequence_length)

    @property
    def vocab_size(self) -> int | None:
        """The largest vocabulary of the data's tokenizers where the data says it, else None."""
        return max((members.vocab_size or 0 for stage in self.stages.stages for members in stage.sets), default=0) or None

    @property
    def tokenizer_path(self) -> str | None:
        """Where the tokenizer of the data lies, if it is here and the files name it; checkpoints keep it for `export` and `generate`."""
        first = self.stages.stages[0].sets[0]
        return str(first.tokenizer_path) if isinstance(first, Nanoset) and first.tokenizer_path else None

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one Trainer batch over all data-parallel replicas: of the last one, or before training of the first."""
        stage = bisect_right(self._begins(), max(0, self.consumed_samples - 1)) - 1
        return self.global_batch_samples * self.stages.stages[stage].sequence_length

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens a sample, of each stage."""
        return [stage.sequence_length for stage in self.stages.stages]

    @property
    def consumed_tokens(self) -> dict[str, int]:
        """Tokens trained on of each set, by its short name."""
        return self.stages.consumed_tokens(self._begins(), self.consumed_samples)

    @property
    def consumed_samples(self) -> int:
        """Samples trained on, over all replicas and since the first step of the run: the position in the stream."""
        return self._resumed_samples + (self.batches_done - self._resumed_batches) * self.global_batch_samples

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse data whose token ids the model does not have; batches are then checked as they are read, too.

        Raises:
            ConfigError: the tokenizer's vocabulary is larger than the model's, or one of the first million tokens is not below it.
        """
        train = [(f"{stage.key}dataset_folder", members) for stage in self.stages.stages for members in stage.sets]
        for key, nanoset in [*train, ("data.validation_folder", self.validation_set)]:
            if nanoset is None:
                continue
            first = np.arange(min(len(nanoset), -(-LOOK_AT_TOKENS // nanoset.sequence_length)))
            largest = max((nanoset.vocab_size or 0) - 1, int(nanoset.windows(first).max()))
            if largest >= vocab_size:
                raise ConfigError(
                    f"{key}: {nanoset.folder} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: "
                    f"it must be at least {largest + 1}"
                )
        self._model_vocab_size = vocab_size

    def _check_tokenizers(self) -> None:
        """Ids of two tokenizers mean different things; folders of `prepare` say which theirs is."""
        sets = [members for stage in self.stages.stages for members in stage.sets]
        known: dict[str, Any] = {}
        for members in [*sets, *([self.validation_set] if self.validation_set is not None else [])]:
            if digest := getattr(members, "summary", {}).get("made_from", {}).get("tokenizer"):
                known.setdefault(digest, members.folder)
        if len(known) > 1:
            first, second, *_ = known.values()
            raise ConfigError(f"data: {first} and {second} were made by different tokenizers: prepare them with one")

    @override
    def setup(self, stage: str) -> None:
        if self.trainer is not None and self.trainer.accumulate_grad_batches < 1:  # Lightning would train on nothing, and say nothing
            raise ConfigError(f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches} must be at least 1")
        self.split_over(self.replicas[1])  # under a strategy that has not done so
        if self.batches_done == 0:  # a new trainer; one that goes on with its fit keeps its place
            self._forget()

    @override
    def train_dataloader(self) -> BatchLoader:
        return BatchLoader(self._begin_training, self._epoch_batches(), self.num_workers, self.pins_memory)

    def _begin_training(self) -> tuple[Batches, Iterator[Key]]:
        begins = self._begins()
        self._check_accumulation()
        self._check_pass()
        self.stages.check_epochs(begins, self._last_position())
        return self._batches(self.stages.streams(begins), self.part), self._train_keys(begins)

    def _runs_by_steps(self) -> bool:
        return self.trainer is not None and self.trainer.max_steps > 0 and self.trainer.max_epochs in (None, -1)

    def _epoch_batches(self) -> int:
        """Batches of what Lightning takes for an epoch: the whole run where steps limit it, else one pass over the data."""
        if self._runs_by_steps():
            return self.trainer.max_steps * self.trainer.accumulate_grad_batches  # type: ignore[union-attr]
        return max(1, len(self.stages.stages[0]) // self.global_batch_samples)

    def _last_position(self) -> int:
        """Samples that the whole run will have consumed; an epoch's where nothing limits it."""
        epoch, trainer = self._epoch_batches(), self.trainer
        if trainer is None:
            return epoch * self.global_batch_samples
        epoch = int(min(epoch, trainer.num_training_batches))
        if trainer.overfit_batches:  # type: ignore[attr-defined]  # set by a connector
            return epoch * self.global_batch_samples
        batches = max(1, trainer.max_epochs or 1) * epoch - self.batches_done
        if trainer.max_steps > 0:
            of_steps = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            batches = of_steps if self._runs_by_steps() else min(batches, of_steps)
        return self.consumed_samples + batches * self.global_batch_samples

    def _check_accumulation(self) -> None:
        """Refuse steps of fewer batches than others, where a stage would begin at another step, or gradients would be lost.

        Raises:
            ConfigError: `accumulate_grad_batches` does not divide an epoch that stages count, or what the checkpoint has done of one.
        """
        if self.trainer is None:
            return
        accumulate, epoch = self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        key = f"trainer.accumulate_grad_batches={accumulate}"
        if len(self.stages.stages) > 1 and epoch % accumulate:
            raise ConfigError(
                f"{key} does not divide the {epoch} batches of an epoch, whose last step is then smaller, so that data_stages would begin "
                "elsewhere: limit the run by max_steps alone, or set limit_train_batches to a multiple"
            )
        done: int = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]  # declared as its base
        if self._resumed_accumulate not in (None, accumulate) and done < epoch and done % accumulate:
            raise ConfigError(
                f"{key}: the checkpoint was trained with {self._resumed_accumulate}, and its {done} batches are no multiple: resume with "
                "the same, or change data.batch_accumulation_per_replica instead"
            )

    def _check_pass(self) -> None:
        """Refuse batches of another size in the middle of a pass: Lightning counts a pass in batches, and goes on counting.

        Raises:
            ConfigError: the pass would end early, or late.
        """
        if self.trainer is None or self._runs_by_steps() or self._resumed_global_batch in (None, self.global_batch_samples):
            return
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.processed:  # type: ignore[attr-defined]  # declared as its base
            raise ConfigError(
                f"global batch of {self.global_batch_samples} samples: the checkpoint was trained with {self._resumed_global_batch} and is "
                "in the middle of a pass, which max_epochs counts in batches: resume with the same, or limit the run by max_steps alone"
            )

    @override
    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        if self.validation_set is None:
            if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
                raise ConfigError(f"data.validation_folder is not set, but `{self.trainer.state.fn.value}` needs it: name a Nanoset folder")
            return []
        num_samples = min(len(self.validation_set), self.validation_samples or len(self.validation_set))
        stream, stride = InOrder(self.validation_set, num_samples), self.global_batch_samples
        return BatchLoader(
            lambda: (self._batches([stream]), ((0, position) for position in count(0, stride))),
            -(-num_samples // stride),
            self.num_workers,
            self.pins_memory,
        )

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def _batches(self, streams: list[Stream] | list[InOrder], part: tuple[int, int] = (0, 1)) -> Batches:
        rank, replicas = self.replicas
        return Batches(
            streams,
            rows=self.rows,
            rank=rank,
            replicas=replicas,
            vocab_size=self._model_vocab_size,
            documents=self.documents,
            part=part,
        )

    def _train_keys(self, begins: list[int]) -> Iterator[Key]:
        """(Stage, position in its stream) of each batch from here on."""
        for position in count(self._position(), self.global_batch_samples):
            stage = bisect_right(begins, position) - 1
            yield stage, position - begins[stage]

    # ---- position --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Begin at the first sample."""
        self._resumed_samples = self._resumed_batches = self._resumed_step = 0  # consumed when the counting of batches began
        self._resumed_accumulate: int | None = None
        self._resumed_global_batch: int | None = None
        self._begun = [0]  # positions at which the stages began that had begun by then

    def _begins(self) -> list[int]:
        """Where each stage begins, in samples of the run: as it was, or as it will be with batches of this size."""
        accumulate = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        step_samples = accumulate * self.global_batch_samples
        later = (stage.start_step - 1 - self._resumed_step for stage in islice(self.stages.stages, len(self._begun), None))
        return [*self._begun, *(self._resumed_samples + steps * step_samples for steps in later)]

    def _position(self) -> int:
        """Where training goes on; `overfit_batches` means the same batches each epoch."""
        if self.trainer is None or not self.trainer.overfit_batches:  # type: ignore[attr-defined]  # set by a connector
            return self.consumed_samples
        return self.batches_done % int(self.trainer.num_training_batches) * self.global_batch_samples

    @override
    def state_dict(self) -> dict[str, Any]:
        begun = [0, *(begin for begin in self._begins()[1:] if begin < self.consumed_samples)]
        return {
            "consumed_samples": self.consumed_samples,
            "batches": self.batches_done,
            "step": self.trainer.global_step if self.trainer is not None else 0,
            "accumulate": self.trainer.accumulate_grad_batches if self.trainer is not None else None,
            "global_batch": self.global_batch_samples,
            "begun": begun,
            "seed": self.seed,
            "stages": [stage.describe() for stage in self.stages.stages[: len(begun)]],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped.

        Raises:
            ConfigError: seed, or data of a stage that had begun, are not the checkpoint's, so that its position would mean other samples.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # evaluation takes the weights only
        self._check_stream(state_dict)
        self._resumed_samples, self._resumed_batches = state_dict["consumed_samples"], state_dict["batches"]
        self._resumed_step, self._begun = state_dict["step"], list(state_dict["begun"])
        self._resumed_accumulate, self._resumed_global_batch = state_dict.get("accumulate"), state_dict.get("global_batch")

    def _check_stream(self, state_dict: dict[str, Any]) -> None:
        if state_dict["seed"] != self.seed:
            raise ConfigError(
                f"data.seed: the checkpoint was trained with {state_dict['seed']}, this run has {self.seed}: resume with the same"
            )
        stages, begun = self.stages.stages, len(state_dict["begun"])
        if len(stages) < begun:
            raise ConfigError(
                f"data.data_stages has {len(stages) - 1} stages, but the checkpoint is in number {begun - 1}: resume with the same"
            )
        for stage, then in zip(stages, state_dict["stages"], strict=False):
            for key, now in stage.describe().items():
                if then[key] != now:
                    raise ConfigError(
                        f"{stage.key}{key}: the checkpoint was trained with {then[key]}, this run has {now}: resume with the same"
                    )
        if begun < len(stages) and stages[begun].start_step <= state_dict["step"]:
            raise ConfigError(
                f"{stages[begun].key}start_training_step={stages[begun].start_step}: the checkpoint is at step {state_dict['step']} and "
                "this stage has not begun: let it start later"
            )


def _open_validation_set(folder: str, sequence_length: int) -> Nanoset:
    try:
        return Nanoset(folder, sequence_length)
    except ConfigError as error:
        raise ConfigError(f"data.validation_folder: {error}") from None
