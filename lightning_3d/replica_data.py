"""What a data module must know of the run: which part of the global batch is this replica's, and how far training is."""

from lightning.pytorch import LightningDataModule

from lightning_3d.errors import ConfigError


class ReplicaDataModule(LightningDataModule):
    """Gives each data-parallel replica `rows` samples of every global batch."""

    micro_batch_size: int
    batch_accumulation_per_replica: int
    _global_batch_samples: int | None = None  # that any number of replicas is to keep

    def set_batch(self, micro_batch_size: int, batch_accumulation_per_replica: int | None, global_batch_samples: int | None) -> None:
        """Say how large a batch is: on each replica, or over all of them.

        Raises:
            ConfigError: a size is below 1, or both ways are given.
        """
        require_at_least(1, micro_batch_size=micro_batch_size)
        if batch_accumulation_per_replica is not None:
            require_at_least(1, batch_accumulation_per_replica=batch_accumulation_per_replica)
        if global_batch_samples is not None and batch_accumulation_per_replica is not None:
            raise ConfigError(
                f"data.global_batch_samples={global_batch_samples} decides batch_accumulation_per_replica, which is given too "
                f"({batch_accumulation_per_replica}): set one of them to null"
            )
        self.micro_batch_size = micro_batch_size
        self.batch_accumulation_per_replica = batch_accumulation_per_replica or 1
        self._global_batch_samples = global_batch_samples
        self.split_over(1)

    def split_over(self, replicas: int) -> None:
        """Work out batch_accumulation_per_replica where global_batch_samples is given; called once dp is known.

        Raises:
            ConfigError: the batch cannot be split over so many replicas.
        """
        if (samples := self._global_batch_samples) is None:
            return
        require_at_least(1, global_batch_samples=samples)
        if samples % (self.micro_batch_size * replicas):
            raise ConfigError(
                f"data.global_batch_samples={samples} is not a multiple of micro_batch_size={self.micro_batch_size} x dp={replicas}: "
                + _ways_to_split(samples, self.micro_batch_size, replicas)
            )
        self.batch_accumulation_per_replica = samples // (self.micro_batch_size * replicas)

    @property
    def rows(self) -> int:
        """Samples of a batch on one replica."""
        return self.micro_batch_size * self.batch_accumulation_per_replica

    @property
    def global_batch_samples(self) -> int:
        """Samples of one Trainer batch over all data-parallel replicas."""
        return self.rows * self.replicas[1]

    @property
    def replicas(self) -> tuple[int, int]:
        """(Coord on the dp axis, size of the dp axis), as the strategy says."""
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer is not None else None
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    @property
    def part(self) -> tuple[int, int]:
        """(Coord on the cp axis, size of the cp axis): which part of each sequence this rank trains on."""
        return getattr(self.trainer.strategy, "sequence_part", (0, 1)) if self.trainer is not None else (0, 1)

    @property
    def batches_done(self) -> int:
        """Batches that the trainer has trained on since the run began: Lightning restores this count with the checkpoint."""
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]  # declared as its base

    @property
    def pins_memory(self) -> bool:
        """Whether batches go to a GPU."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _ways_to_split(samples: int, micro_batch_size: int, replicas: int) -> str:
    """What to do about a batch that cannot be split: the nearest dp, or the nearest batch."""
    step = micro_batch_size * replicas
    batches = [each for each in (samples // step * step, samples // step * step + step) if each]
    change = f"set it to {' or '.join(map(str, batches))}"
    if samples % micro_batch_size:
        return change
    fitting = [dp for dp in range(1, samples // micro_batch_size + 1) if samples // micro_batch_size % dp == 0]
    nearest = [*[dp for dp in fitting if dp < replicas][-1:], *[dp for dp in fitting if dp > replicas][:1]]
    return f"start processes for dp={' or '.join(map(str, nearest))}, or {change}"


def require_at_least(least: int, **values: int) -> None:
    """Refuse an option of `data:` that is no whole number, or below the least."""
    for key, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"data.{key} is {value!r}: give a whole number of at least {least}")
