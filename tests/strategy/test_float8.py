"""Float8, emulated: one linear against scales and casts by hand, layouts against one process, and what is refused.

Stated tolerance: gradients of the first step agree with those of one process, emulated, to 1e-5 of their norm, which is float32's; float8
itself is off by 0.1. Over tp, where each rank scales its own part, they would be off by more if scales were no powers of 2.
"""

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from ranks_float8 import Run, by_hand, fit
from ranks_gpt import Data
from ranks_precision import CONFIG
from ranks_refusals import Lengths, Plain, llama
from test_bad_input import trainer

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.float8 import Float8, described
from lightning_3d.parallel.recorder import Call
from lightning_3d.testing import RankPool

TOLERANCE = 1e-5
ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS, NORMS = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48, 2 * 32  # elements of a block
CASES = [
    Run((2, 1, 1), Float8(emulate=True), {"data_parallel": "fsdp", "recompute": "full"}, gathers=True),
    Run((2, 1, 1), Float8(emulate=True), {"data_parallel": "fsdp", "compile": "aot_eager"}, gathers=True),
    Run((2, 1, 2), Float8(emulate=True), {"data_parallel": "zero2"}, gathers=True),
    Run((4, 1, 1), Float8(emulate=True), {"data_parallel": "hsdp", "dp_replicate": 2}, gathers=True),
    Run((2, 1, 2), Float8("rowwise", emulate=True), {"data_parallel": "fsdp"}),
    Run((1, 2, 1), Float8("rowwise", emulate=True), {"sequence_parallel": True}),
    Run((2, 2, 1), Float8(emulate=True), {"data_parallel": "fsdp"}, gathers=True),
    Run((1, 1, 1), Float8(emulate=True), {"compile": "aot_eager"}),
]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_linear_by_hand(recipe: str, pool: RankPool) -> None:
    for ours, expected in pool.run(by_hand, 1, (recipe,))[0]:
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def error(seen: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest error of a first gradient, relative to its norm."""
    first, plain = seen["gradients"][0], expected["gradients"][0]
    return max(float((first[name] - plain[name]).norm() / plain[name].norm()) for name in first)


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[Any, dict[str, Any]]:
    """In one process: in each recipe, and without float8."""
    kinds = {"tensorwise": Float8(emulate=True), "rowwise": Float8("rowwise", emulate=True), None: None}
    return {name: pool.run(fit, 1, (Run((1, 1, 1), float8),))[0] for name, float8 in kinds.items()}


@pytest.mark.parametrize("run", CASES, ids=lambda run: f"{run.layout}-{run.strategy}")
def test_layouts(run: Run, alone: dict[Any, dict[str, Any]], pool: RankPool) -> None:
    assert run.float8 is not None
    plain, without = alone[run.float8.recipe], alone[None]
    assert error(plain, without) > 0.05  # else it is not float8
    for seen in pool.run(fit, run.world_size, (run,), timeout_s=280):
        assert error(seen, plain) <= TOLERANCE
        assert seen["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE)
        assert all(name.split(".", 2)[2] in ALL for name in seen["converted"])
        assert len(seen["converted"]) == 28 // run.layout[2]
        assert seen["gathered"] == (seen["converted"] if run.gathers else [])


def test_fsdp_sends_float8(pool: RankPool) -> None:
    """A byte an element of each linear, before a block's forward and backward; and once the largest value of each weight."""
    run = Run((2, 1, 1), Float8(emulate=True), {"data_parallel": "fsdp"}, gathers=True)
    blocks = CONFIG.num_hidden_layers
    for seen in pool.run(fit, 2, (run,)):
        counts = Counter(seen["sent"])
        assert counts[Call("all-gather", "dp", LINEARS + NORMS * 4)] == 3 * blocks  # two forwards and backwards; once it stays
        assert counts[Call("all-reduce", "dp", 4 * len(seen["gathered"]))] == 1
        assert not counts[Call("all-gather", "dp", (LINEARS + NORMS) * 4)]


def test_filter_and_summary(pool: RankPool) -> None:
    float8 = Float8("rowwise", ("layers.[01].mlp.*", "*.o_proj"), emulate=True)
    names = pool.run(fit, 1, (Run((1, 1, 1), float8),))[0]["converted"]
    assert described(names, float8, names[:2]) == (
        "4 layers.*.self_attn.o_proj, 2 layers.*.mlp.gate_proj, 2 layers.*.mlp.up_proj, 2 layers.*.mlp.down_proj; rowwise scales, "
        "emulated, 2 gathered in float8"
    )


def unknown() -> Float8:
    float8 = Float8()
    object.__setattr__(float8, "recipe", "blockwise")  # past the types that tests check
    return float8


@pytest.mark.parametrize(
    ("float8", "message"),
    [
        (unknown(), "float8.recipe='blockwise': choose from ['tensorwise', 'rowwise']"),
        (Float8(), "float8 needs a CUDA device of capability 8.9 or more, and this is cpu: set float8.emulate to true"),
    ],
)
def test_what_cannot_run(float8: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        trainer(1, float8=float8).fit(llama(), datamodule=Lengths(16))
    assert str(error.value).startswith(message)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("lightning_3d.parallel.float8.find_spec", lambda name: None if name == "torchao" else found(name))
    with pytest.raises(ConfigError, match=r"^float8 needs torchao, which is not there: pip install 'lightning-3d\[float8\]'"):
        trainer(1, float8=Float8(emulate=True)).fit(llama(), datamodule=Lengths(16))


def test_a_module_without_stages() -> None:
    with pytest.raises(ConfigError, match=r"^float8=Float8\(.*has no effect on Plain"):
        trainer(1, float8=Float8(emulate=True)).fit(Plain(), datamodule=Data())
