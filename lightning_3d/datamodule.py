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

from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_3d.data.batches import Batches, BatchLoader
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.errors import ConfigError


class NanosetDataModule(LightningDataModule):
    """Batches {"input_ids", "labels"} of shape (micro_batch_size * batch_accumulation_per_replica, sequence_length).

    Args:
        dataset_folder: Nanoset to train on, written by `prepare` or by datatrove.
        sequence_length: tokens a sample.
        micro_batch_size: samples a microbatch.
        batch_accumulation_per_replica: microbatches a batch, on each data-parallel replica.
        validation_folder: Nanoset for validation, test and predict: its samples in order, the last batch filled up with masked rows.
        validation_samples: use only so many samples of it, the same in every layout.
        num_workers: processes that read ahead; 0 reads in the trainer's.
        seed: of the order; each epoch has another.

    Raises:
        ConfigError: a size is not positive, a folder cannot be read.
    """

    def __init__(
        self,
        dataset_folder: str,
        sequence_length: int,
        micro_batch_size: int = 1,
        batch_accumulation_per_replica: int = 1,
        validation_folder: str | None = None,
        validation_samples: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__()
        _require_at_least(1, sequence_length=sequence_length, micro_batch_size=micro_batch_size)
        _require_at_least(1, batch_accumulation_per_replica=batch_accumulation_per_replica)
        _require_at_least(0, num_workers=num_workers)
        if validation_samples is not None:
            _require_at_least(1, validation_samples=validation_samples)
        self.sequence_length = sequence_length
        self.batch_accumulation_per_replica = batch_accumulation_per_replica
        self.rows = micro_batch_size * batch_accumulation_per_replica
        self.num_workers = num_workers
        self.seed = seed
        self.train_set = _open("dataset_folder", dataset_folder, sequence_length)
        self.validation_set = _open("validation_folder", validation_folder, sequence_length) if validation_folder else None
        self.validation_samples = validation_samples
        self._model_vocab_size: int | None = None
        self._resumed_samples = 0  # consumed when the counting of batches below began
        self._resumed_batches = 0

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's vocabulary where the data says so, else None."""
        return self.train_set.vocab_size

    @property
    def global_batch_samples(self) -> int:
        """Samples of one Trainer batch over all data-parallel replicas."""
        return self.rows * self._replicas()[1]

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one Trainer batch over all data-parallel replicas."""
        return self.global_batch_samples * self.sequence_length

    @property
    def consumed_samples(self) -> int:
        """Samples trained on, over all replicas and since the first step of the run: the position in the stream."""
        return self._resumed_samples + (self._batches_done() - self._resumed_batches) * self.global_batch_samples

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse data whose token ids the model does not have; batches are then checked as they are read, too.

        Raises:
            ConfigError: the tokenizer's vocabulary is larger than the model's, or one of the first million tokens is not below it.
        """
        for key, nanoset in (("dataset_folder", self.train_set), ("validation_folder", self.validation_set)):
            if nanoset is None:
                continue
            largest = max((nanoset.vocab_size or 0) - 1, int(nanoset.shards[0].tokens()[: 1 << 20].max(initial=0)))
            if largest >= vocab_size:
                raise ConfigError(
                    f"data.{key}: {nanoset.folder} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: "
                    f"it must be at least {largest + 1}"
                )
        self._model_vocab_size = vocab_size

    @override
    def setup(self, stage: str) -> None:
        if self._batches_done() == 0:  # a new trainer; one that goes on with its fit keeps its place
            self._resumed_samples = self._resumed_batches = 0

    @override
    def train_dataloader(self) -> BatchLoader:
        trainer = self.trainer
        if trainer is not None and trainer.max_steps > 0 and trainer.max_epochs in (None, -1):
            length = trainer.max_steps * trainer.accumulate_grad_batches
        else:
            length = max(1, len(self.train_set) // self.global_batch_samples)
        return self._loader(self.train_set, self.seed, len(self.train_set), length)

    @override
    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        if self.validation_set is None:
            if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
                raise ConfigError(f"data.validation_folder is not set, but `{self.trainer.state.fn.value}` needs it: name a Nanoset folder")
            return []
        num_samples = min(len(self.validation_set), self.validation_samples or len(self.validation_set))
        return self._loader(self.validation_set, None, num_samples, -(-num_samples // self.global_batch_samples))

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def _loader(self, nanoset: Nanoset, seed: int | None, num_samples: int, length: int) -> BatchLoader:
        batches = Batches(
            nanoset,
            rows=self.rows,
            rank=self._replicas()[0],
            seed=seed,
            num_samples=num_samples,
            vocab_size=self._model_vocab_size,
        )
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        first = (lambda: 0) if seed is None else self._position
        return BatchLoader(batches, first, length, self.global_batch_samples, self.num_workers, on_cuda)

    def _position(self) -> int:
        """Where training goes on; `overfit_batches` means the same batches each epoch."""
        return 0 if getattr(self.trainer, "overfit_batches", 0) else self.consumed_samples

    def _batches_done(self) -> int:
        """Batches that the trainer has trained on since the run began: Lightning restores this count with the checkpoint."""
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]  # declared as its base

    def _replicas(self) -> tuple[int, int]:
        """Return (coord on the dp axis, size of the dp axis)."""
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer is not None else None
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    def _stream(self) -> dict[str, Any]:
        """Return what decides which sample stands at a position."""
        return {"seed": self.seed, "sequence_length": self.sequence_length, "dataset_folder": self.train_set.fingerprint()}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples, "batches": self._batches_done(), "stream": self._stream()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped.

        Raises:
            ConfigError: seed, sequence_length or data are not the checkpoint's, so that its position would mean other samples.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # evaluation takes the weights only
        for key, now in self._stream().items():
            if (then := state_dict["stream"][key]) != now:
                raise ConfigError(f"data.{key}: the checkpoint was trained with {then}, this run has {now}: resume with the same")
        self._resumed_samples = state_dict["consumed_samples"]
        self._resumed_batches = state_dict["batches"]


def _open(key: str, folder: str, sequence_length: int) -> Nanoset:
    try:
        return Nanoset(folder, sequence_length)
    except ConfigError as error:
        raise ConfigError(f"data.{key}: {error}") from None


def _require_at_least(least: int, **values: int) -> None:
    for key, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"data.{key} is {value!r}: give a whole number of at least {least}")
