"""Recomputation changes what is kept and what is computed twice, and no number."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_resume import Layout, Run, fit
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.parallel.recompute import check_recompute, recompute_blocks
from lightning_3d.testing import RankPool

LAYOUTS: list[tuple[Layout, list[Any]]] = [
    (Layout(dp=2, mode="fsdp"), ["full", "selective"]),
    (Layout(dp=2, mode="zero2"), [2]),
    (Layout(pp=2), ["full"]),
    (Layout(pp=2, virtual=2), ["selective"]),
    (Layout(tp=2), ["selective"]),
    (Layout(tp=2, sequence_parallel=True), ["full", "selective"]),
]


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **kwargs or {})


def one_pass(mode: Any) -> tuple[Counter[str], int, list[torch.Tensor]]:
    """Calls of a forward and backward through 4 layers, bytes kept between the two, and the gradients."""
    torch.manual_seed(0)
    stage = LlamaStage(LlamaConfig(64, 32, 48, 4, 4, 2), range(4), first=True, last=True)
    recompute_blocks(stage, mode)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with Count() as count:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = stage(torch.arange(96).reshape(2, 48) % 64).square().mean()
        before = sum(kept.values())
        loss.backward()
    return count.calls, before, [p.grad for p in stage.parameters() if p.grad is not None]


def test_what_is_computed_twice() -> None:
    """A layer has 7 matrix products and one attention; the backward has two products for each, and the head 3 in all.

    What is repeated ends before the layer's last product, whose output nothing needs.
    """
    products, attention = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    passes = {mode: one_pass(mode) for mode in ("none", "full", "selective", 2)}
    calls = {mode: (counts[products], counts[attention]) for mode, (counts, _, _) in passes.items()}
    assert calls == {"none": (3 * 28 + 3, 4), "full": (3 * 28 + 24 + 3, 8), "selective": (3 * 28 + 3, 4), 2: (3 * 28 + 12 + 3, 6)}
    silu = {mode: counts["aten.silu.default"] for mode, (counts, _, _) in passes.items()}
    assert silu == {"none": 4, "full": 8, "selective": 8, 2: 6}
    assert passes["full"][1] < passes[2][1] < passes["none"][1]
    for _, _, gradients in passes.values():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, passes["none"][2], strict=True))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("layout", "modes"), LAYOUTS, ids=str)
def test_the_same_numbers_in_every_layout(layout: Layout, modes: list[Any], pool: RankPool, tmp_path: Path) -> None:
    """Losses and weights of 8 steps, bit by bit."""
    run = Run(layout, str(tmp_path / "none"))
    plain = pool.run(fit, layout.world_size, (run,))
    for mode in modes:
        changed = replace(run, layout=replace(layout, recompute=mode), folder=str(tmp_path / str(mode)))
        for seen, expected in zip(pool.run(fit, layout.world_size, (changed,)), plain, strict=True):
            assert seen["losses"] == expected["losses"]
            assert [name for name, value in seen["final"].items() if not torch.equal(value, expected["final"][name])] == []


@pytest.mark.parametrize("mode", [0, -1, True])
def test_modes_that_are_none(mode: Any) -> None:
    with pytest.raises(ConfigError, match=rf"recompute={mode!r}: choose none, full, selective, or a number n of at least 1"):
        check_recompute(mode)
