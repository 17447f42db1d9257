"""Tensor-parallel pieces on each rank, against the computation that is not cut, in float64."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks_fit import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.errors import ConfigError
from lightning_3d.mesh import TP
from lightning_3d.model.loss import token_losses
from lightning_3d.parallel.data import add_up, local, local_as
from lightning_3d.parallel.loss import vocab_parallel_argmax, vocab_parallel_token_losses
from lightning_3d.parallel.plan import Row, apply_plan
from lightning_3d.parallel.recorder import Call, Recorder
from lightning_3d.parallel.tensor import TensorParallel
from lightning_3d.placement import local_range
from lightning_3d.seeding import materialise

B, S, D = 2, 8, 6


def group(*, sequence_parallel: bool = False) -> TensorParallel:
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(TP,))
    return TensorParallel(mesh, sequence_parallel=sequence_parallel)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(of: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its product with ``weight``."""
    x = x.clone().requires_grad_()
    y = of(x)
    (y * weight).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def part(x: Tensor, tp: TensorParallel) -> Tensor:
    return x.chunk(tp.size, 1)[tp.index] if tp.sequence_parallel else x


def collectives(sequence_parallel: bool) -> list[tuple[str, Tensor, Tensor]]:
    """(what, mine, expected) of enter and leave, forward and backward; rank r works with a factor of its own in between."""
    tp = group(sequence_parallel=sequence_parallel)
    x, weights = random(B, S, D), [random(B, S, D, seed=10 + r) for r in range(tp.size)]
    entered, entered_grad = gradient(tp.enter, part(x, tp), weights[tp.index])
    partials = [random(B, S, D, seed=20 + r) for r in range(tp.size)]
    left, left_grad = gradient(tp.leave, partials[tp.index], part(weights[0], tp))
    return [
        ("enter", entered, x),
        ("gradient of enter", entered_grad, part(sum(weights, torch.zeros(())), tp)),
        ("leave", left, part(sum(partials, torch.zeros(())), tp)),
        ("gradient of leave", left_grad, weights[0]),
    ]


def sent_under_autocast() -> list[Call]:
    """Forward and backward of enter, from float32."""
    tp = group(sequence_parallel=True)
    with torch.autocast("cpu", torch.bfloat16), Recorder() as recorder:
        gradient(tp.enter, part(random(B, S, D).float(), tp), torch.ones(B, S, D, dtype=torch.bfloat16))
    return recorder.calls


def indivisible_sequence() -> str:
    tp = group(sequence_parallel=True)
    try:
        tp.leave(random(B, tp.size + 1, D))
    except ConfigError as error:
        return str(error)
    return "accepted"


def losses(vocab: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Token losses, log-sum-exps, and the gradient of both, with masked rows; ids of the largest logit, with ties."""
    tp = group()
    logits = (4 * random(B, S, vocab)).to(dtype)
    labels = torch.randint(0, vocab, (B, S), generator=torch.Generator().manual_seed(1))
    labels[0, :3], labels[1] = -100, labels[1].masked_fill(torch.arange(S) % 2 == 0, -100)
    start, end = local_range(vocab, tp.size, tp.index)

    def total(nll: Tensor, lse: Tensor) -> Tensor:
        return (nll * random(B, S, seed=2)).sum() + (lse * random(B, S, seed=3)).sum()

    whole, mine = logits.clone().requires_grad_(), logits[..., start:end].clone().requires_grad_()
    expected, seen = token_losses(whole, labels), vocab_parallel_token_losses(mine, labels, vocab, tp)
    total(*expected).backward()
    total(*seen).backward()
    assert whole.grad is not None
    assert mine.grad is not None
    ties = logits.round()
    ids = vocab_parallel_argmax(ties[..., start:end], vocab, tp)
    return {
        "nll": (seen[0].detach(), expected[0].detach()),
        "lse": (seen[1].detach(), expected[1].detach()),
        "gradient": (mine.grad, whole.grad[..., start:end]),
        "argmax": (ids, ties.argmax(-1)),
    }


class Pieces(nn.Module):
    """One module for each kind of row in a plan."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, D), nn.Embedding(S, D)
        self.first_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        # Heads of 8: a norm over 2 numbers that happen to be close multiplies rounding by a thousand.
        self.rows, self.head_norm, self.columns = nn.Linear(D, 32), nn.LayerNorm(8), nn.Linear(32, D)

    def forward(self, ids: Tensor, outside: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.first_norm(self.tokens(ids) + outside(self.positions(torch.arange(S).unsqueeze(0))))
        heads = self.head_norm(self.rows(self.norm(x)).unflatten(-1, (-1, 8)))
        return x + self.columns(heads.tanh().flatten(2))


PLAN = (
    Row("tokens", 0, "leave"),
    Row("positions", None, "outside"),
    Row("first_norm", None, "outside"),
    Row("norm", None, "enter"),
    Row("rows", 0, "inside"),
    Row("head_norm", None, "inside"),
    Row("columns", 1, "leave"),
)


def pieces(vocab: int, sequence_parallel: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The output and every parameter's gradient, of the cut module and of the whole one."""
    tp = group(sequence_parallel=sequence_parallel)
    with torch.device("meta"):
        whole, cut = Pieces(vocab), Pieces(vocab)
    partial = apply_plan(cut, PLAN, tp)
    for module in (whole, cut):
        materialise(module, 5, torch.device("cpu"))
    ids = torch.randint(0, vocab, (B, S), generator=torch.Generator().manual_seed(1))
    weight = random(B, S, D)
    expected = whole(ids, lambda x: x)
    (expected * weight).sum().backward()
    # The whole positions are cut by hand under sequence parallelism, as a user's module would have to.
    seen = cut(ids, lambda x: part(x, tp))
    (seen * part(weight, tp)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in cut.named_parameters()}
    gradients |= {k: local_as(v, gradients[k]) for k, v in add_up({n: local(gradients[n]) for n in partial}, tp.group).items()}
    results: dict[str, Any] = {"output": (seen.detach(), part(expected.detach(), tp))}
    mine = full({f"stages.0.{name}": value for name, value in gradients.items() if value is not None})
    return results | {name: (mine[name], parameter.grad) for name, parameter in whole.named_parameters()}


def refused_rows() -> list[str]:
    """What the plan says of rows that make no sense, and of embeddings that cannot be cut."""
    tp, messages = group(), []
    cases = [
        (nn.Linear, (4, 4), {}, Row("*", 0, "leave")),
        (nn.Linear, (4, 4), {}, Row("*", 1, "inside")),
        (nn.Linear, (4, 4), {}, Row("*", 0, "enter")),
        (nn.Embedding, (4, 4), {}, Row("*", 0, "inside")),
        (nn.Embedding, (4, 4), {"padding_idx": 0}, Row("*", 0, "leave")),
        (nn.Embedding, (4, 4), {"sparse": True}, Row("*", 0, "leave")),
        (nn.Linear, (4, 4), {}, Row("other", 0, "inside")),
    ]
    for cls, args, options, row in cases:
        with torch.device("meta"):
            stage = nn.ModuleDict({"only": cls(*args, **options)})
        try:
            apply_plan(stage, [row], tp)
            messages.append("accepted")
        except ConfigError as error:
            messages.append(str(error))
    return messages
