"""Loss in chunks of tokens: evaluation sees what it sees of whole logits. (tests/parity has the training, tests/model the memory.)"""

import pytest
import torch
from ranks_fit import Case
from ranks_loss_chunks import evaluate

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.testing import RankPool


@pytest.mark.parametrize(("layout", "tied"), [((1, 2, 1), False), ((2, 1, 2), True)], ids=str)
def test_evaluation(layout: tuple[int, int, int], tied: bool, pool: RankPool) -> None:
    loss, ids = pool.run(evaluate, 1, (Case(None), 1, tied))[0]
    case = Case(layout, strategy={"data_parallel": "fsdp"})
    for seen, tokens in pool.run(evaluate, case.world_size, (case, 5, tied)):
        assert seen == pytest.approx(loss, rel=0, abs=1e-12)
        assert torch.equal(tokens, ids)


def test_no_chunks() -> None:
    with pytest.raises(ConfigError, match=r"^model.loss_chunks=0 must be at least 1"):
        LlamaModule(LlamaConfig(61, 32, 48, 4, 4, 2), loss_chunks=0)
