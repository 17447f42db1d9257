"""What is made up is a set like any other."""

import numpy as np
import pytest
import torch

from lightning_3d.data.nanoset import IGNORE
from lightning_3d.data.order import sample_ids
from lightning_3d.data.synthetic import SyntheticTokens
from lightning_3d.errors import ConfigError
from lightning_3d.synthetic_datamodule import SyntheticDataModule


def test_synthetic_data() -> None:
    """Shuffled like any set; other samples for validation, of the same language; resumable."""
    data = SyntheticDataModule(100, 8, 2, num_samples=50, validation_samples=3, mask_documents=True, seed=7)
    batches, validation = list(data.train_dataloader()), list(data.val_dataloader())
    assert len(batches) == 25
    source, rows = SyntheticTokens(100, 8, 50, 7), torch.cat([batch["input_ids"] for batch in batches])
    assert rows.tolist() == source.windows(sample_ids(np.arange(50), 50, 7))[:, :-1].tolist()
    assert set(batches[0]) == {"input_ids", "labels", "position_ids"}
    assert [len(batch["input_ids"]) for batch in validation] == [2, 2]
    assert validation[1]["labels"][1].tolist() == [IGNORE] * 8
    assert (
        torch.cat([batch["input_ids"] for batch in validation])[:3].tolist()
        == SyntheticTokens(100, 8, 53, 7).windows(np.arange(50, 53))[:, :-1].tolist()
    )
    data.check_vocabulary(100)
    with pytest.raises(ConfigError, match=r"synthetic data .* has token ids up to 99, but the model's vocab_size is 50"):
        data.check_vocabulary(50)
