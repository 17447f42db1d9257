"""One seed, one model: every layout starts from bitwise the same weights; tests/parity looks at 8 ranks too."""

import pytest
import torch
from ranks_weights import Shared, start, whole
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.seeding import materialise, seed_of
from lightning_3d.testing import RankPool

LAYOUTS = [
    ({"tp": 2}, {}),
    ({"pp": 2}, {"stage_coords": (0, 1, 0, 1)}),
    ({"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}),
    ({"dp": 4}, {"data_parallel": "zero2"}),
    ({"tp": 4}, {"sequence_parallel": True}),
    ({"dp": 4, "replicate": 2}, {"data_parallel": "hsdp"}),
    ({"dp": 2, "pp": 2}, {"data_parallel": "fsdp"}),
]


@pytest.mark.parametrize(("dims", "options"), LAYOUTS, ids=str)
def test_every_layout_starts_alike(dims: dict[str, int], options: dict, pool: RankPool) -> None:
    """Tied embeddings on two stages, sizes that do not divide, biases cut with their rows."""
    one = {name: whole(name) for name in ("gpt", "llama")}
    world_size = dims.get("dp", 1) * dims.get("tp", 1) * dims.get("pp", 1)
    ranks = pool.run(start, world_size, (dims, options))
    for name, weights in one.items():
        assert set().union(*(seen[name] for seen in ranks)) == weights.keys()
        for seen in ranks:
            for key, weight in seen[name].items():
                assert torch.equal(weight, weights[key]), key


def test_no_two_layers_start_alike() -> None:
    """Layers on virtual stages of one rank, or of different ranks with the same generator, would."""
    drawn = [weight for key, weight in whole("llama").items() if weight.dim() > 1]
    assert len({weight.sum().item() for weight in drawn}) == len(drawn)


def test_seeds_differ_by_name_and_seed() -> None:
    assert len({seed_of(seed, name) for seed in range(10) for name in ("", "h.1", "h.11", "1:h.1")}) == 40
    assert 0 <= seed_of(42, "h.0") < 2**63


def test_shared_parameters_stay_shared() -> None:
    with torch.device("meta"):
        module = Shared()
    assert module.first.weight is module.second.weight
    torch.manual_seed(5)
    before = torch.get_rng_state()
    materialise(module, 0, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is the user's
    assert module.first.weight is module.second.weight
    assert [name for name, _ in module.named_parameters()] == ["first.weight", "norm.weight", "norm.bias"]
    assert module.first.weight.abs().sum() > 0
    assert torch.equal(module.norm.running_var, torch.ones(4))
    assert torch.equal(module.norm.num_batches_tracked, torch.tensor(0))


def test_what_is_not_drawn_is_not_a_number() -> None:
    class Half(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    with torch.device("meta"):
        module = Half(2, 2)
    materialise(module, 0, torch.device("cpu"))
    assert module.bias.isnan().all()


def test_owner_without_reset_parameters() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"scales": nn.ParameterList([nn.Parameter(torch.ones(2))])})
    with pytest.raises(ConfigError, match=r"^ParameterList at 'scales' owns \['0'\] but has no reset_parameters\(\): define it"):
        materialise(module, 0, torch.device("cpu"))
