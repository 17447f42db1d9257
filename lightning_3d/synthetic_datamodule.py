"""Data for benchmarks and first runs: nothing to prepare, and resumed like any other."""

from functools import partial

from typing_extensions import override

from lightning_3d.data.stream import Samples
from lightning_3d.data.synthetic import SyntheticTokens
from lightning_3d.datamodule import NanosetDataModule


class SyntheticDataModule(NanosetDataModule):
    """Tokens that are made up as they are read (see data/synthetic.py): what a benchmark needs, and a run without any file.

    Args:
        vocab_size: of the model.
        sequence_length: tokens a sample.
        micro_batch_size: samples a microbatch.
        batch_accumulation_per_replica: microbatches a batch, on each data-parallel replica.
        num_samples: of an epoch.
        mask_documents: attention within documents only.
        validation_samples: other samples of the same language.
        num_workers: processes that make samples ahead.
        seed: of the language and the order.

    Raises:
        ConfigError: a size is not positive.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        micro_batch_size: int = 1,
        batch_accumulation_per_replica: int = 1,
        num_samples: int = 1 << 30,
        mask_documents: bool = False,
        validation_samples: int = 64,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        self._make = partial(SyntheticTokens, vocab_size, seed=seed)
        self._num_samples = num_samples
        super().__init__(
            "synthetic",
            sequence_length,
            micro_batch_size,
            batch_accumulation_per_replica,
            mask_documents=mask_documents,
            validation_samples=validation_samples,
            num_workers=num_workers,
            seed=seed,
        )
        self.validation_set = self._make(sequence_length, num_samples=validation_samples, first_sample=num_samples)

    @override
    def open_train_set(self, folder: str, sequence_length: int) -> Samples:
        return self._make(sequence_length, num_samples=self._num_samples)
