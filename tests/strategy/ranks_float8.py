"""A small Llama in emulated float8, and without: what a rank saw of two steps; and one linear by hand."""

from dataclasses import dataclass, field
from typing import Any

import torch
from ranks_fit import Case, Record, full, trainer_for
from ranks_precision import CONFIG
from ranks_recorder import OneStep
from scenario import Replica, quiet
from torch import Tensor, nn

from lightning_3d.module import LlamaModule
from lightning_3d.optim.adamw import AdamW
from lightning_3d.parallel.float8 import Float8, convert_linears

ROWS, MICRO = 8, 2


@dataclass(frozen=True)
class Run:
    layout: tuple[int, int, int]
    float8: Float8 | None
    strategy: dict[str, Any] = field(default_factory=dict)
    gathers: bool = False

    @property
    def world_size(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp


def fit(run: Run) -> dict[str, Any]:
    quiet()
    torch._dynamo.reset()
    record = Record()
    rows = ROWS // run.layout[0]
    strategy = {"batch_accumulation_per_replica": rows // MICRO, "float8": run.float8, **run.strategy}
    trainer = trainer_for(Case(run.layout, strategy=strategy, trainer={"gradient_clip_val": 0.5}), record)
    trainer.callbacks.append(sent := OneStep())
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, 17), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
    module = LlamaModule(CONFIG, AdamW(learning_rate=1e-3))
    trainer.fit(module, Replica(trainer.strategy, [batch] * 2, rows))
    assert module.built is not None
    return record.seen | {
        "weights": full(dict(module.named_parameters())),
        "converted": module.built.float8,
        "gathered": module.built.float8_gathered,
        "sent": sent.recorder.calls,
    }


def by_hand(recipe: Any) -> list[tuple[Tensor, Tensor]]:
    """(ours, expected): output and gradients of one linear, with its scales, casts and products written out."""
    torch.manual_seed(0)
    stage = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(24, 40))])})
    linear: Any = stage["layers"][0][0]  # type: ignore[index]
    x, grad = torch.randn(2, 6, 24, requires_grad=True), torch.randn(2, 6, 40)
    assert convert_linears(stage, Float8(recipe, emulate=True), 1) == ["layers.0.0"]
    y = linear(x)
    y.backward(grad)

    def rounded(tensor: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """By what float8 keeps of it; ``dim`` is the one that the product sums over."""
        top = tensor.abs().amax() if recipe == "tensorwise" else tensor.abs().amax(dim, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / top)))
        return (tensor * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() / scale

    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    flat, g, w = x.detach().flatten(0, 1), grad.flatten(0, 1), linear.weight.detach()
    expected_y = rounded(flat, 1, forward) @ rounded(w, 1, forward).T + linear.bias.detach()
    of_x = rounded(g, 1, backward) @ rounded(w, 0, forward)
    of_w = rounded(g, 0, backward).T @ rounded(flat, 0, forward)
    assert x.grad is not None
    return [(y.detach().flatten(0, 1), expected_y), (x.grad.flatten(0, 1), of_x), (linear.weight.grad, of_w), (linear.bias.grad, g.sum(0))]
