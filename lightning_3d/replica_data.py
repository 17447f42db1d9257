"""What a data module must know of the run: which part of the global batch is this replica's, and how far training is."""

from lightning.pytorch import LightningDataModule


class ReplicaDataModule(LightningDataModule):
    """Gives each data-parallel replica `rows` samples of every global batch."""

    micro_batch_size: int
    batch_accumulation_per_replica: int

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
    def batches_done(self) -> int:
        """Batches that the trainer has trained on since the run began: Lightning restores this count with the checkpoint."""
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]  # declared as its base

    @property
    def pins_memory(self) -> bool:
        """Whether batches go to a GPU."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
