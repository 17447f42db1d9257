"""Lightning's hooks come in the same order as on one device: nothing of its loops is replaced."""

from dataclasses import replace

import pytest
from ranks_fit import Case
from ranks_hooks import Manual, Scheduled, trace

from lightning_3d.testing import RankPool

OPTIONS = {
    "automatic": Case(None, Scheduled, trainer={"num_sanity_val_steps": 1, "gradient_clip_val": 1.0}),
    "accumulate": Case(None, Scheduled, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "val_check_interval": 1}),
    "manual": Case(None, Manual),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_order_of_hooks(name: str, pool: RankPool) -> None:
    (plain,) = pool.run(trace, 1, (OPTIONS[name],))
    assert plain.count("module.training_step") == 4
    assert plain.count("module.optimizer_step") == {"automatic": 4, "accumulate": 2, "manual": 0}[name]
    for layout in ((1, 1, 1), (1, 1, 2), (2, 1, 1)):
        case = replace(OPTIONS[name], layout=layout)
        for rank, seen in enumerate(pool.run(trace, case.world_size, (case,))):
            assert seen == plain, f"layout {layout}, rank {rank}"
