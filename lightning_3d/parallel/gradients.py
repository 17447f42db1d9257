"""Gradients between the schedule, autograd and the optimizer: the hand-over.

A schedule runs forward *and* backward inside ``training_step``; Lightning then calls ``zero_grad`` and ``loss.backward()``. So the
gradients are taken out of ``p.grad`` after the schedule, and the loss given to Lightning is an autograd tensor whose backward(g)
multiplies them by g, reduces them over the ranks and puts them into ``p.grad``, adding where something is there. Whatever a user
does to the loss (scale it, add a term, accumulate, several losses in a step) is right, since gradients are linear in the loss.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_3d.mesh import Mesh
from lightning_3d.parallel.data import add_up, is_reduced_by_fsdp, local, local_as
from lightning_3d.parallel.tensor import local_leaves
from lightning_3d.parallel.tied import exchange_tied


class Gradients:
    """The gradients of this rank's parameters, by name.

    Args:
        parameters: this rank's parameters by their global names.
        partial: names of those whose gradients are partial sums over tp.
        tied: pp coords of the holders of parameters that several stages share.
        copies: of those that two stages of this rank hold, the second.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        partial: set[str],
        tied: Mapping[str, list[int]],
        copies: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._parameters, self._copies = dict(parameters), dict(copies or {})  # frozen ones too: they may thaw
        self._held = self._parameters | {_copy_of(name): parameter for name, parameter in self._copies.items()}
        self._mesh, self._partial, self._tied = mesh, partial, tied
        # Sums of the earlier batches of an accumulation, which no other rank has seen. Not in p.grad: what ordinary autograd puts there
        # (a user's L2 term) is whole on every rank and must not be added up over them.
        self._unreduced: dict[str, Tensor] = {}

    def run_apart(self, schedule: Callable[[], None]) -> dict[str, Tensor]:
        """Run a schedule and return the gradients that it made (this rank's parts), leaving those that were there as they were."""
        before = {name: p.grad for name, p in self._held.items()}
        for parameter in self._held.values():
            parameter.grad = None
        try:
            with local_leaves(self._held) as leaves:
                schedule()
            fresh = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            made = {name: local(p.grad) for name, p in self._held.items() if p.grad is not None}
        finally:
            for name, parameter in self._held.items():
                parameter.grad = before[name]
        _add_to(fresh, made)
        _add_to(fresh, {name: fresh.pop(_copy_of(name)) for name in self._copies if _copy_of(name) in fresh})
        return fresh

    def drop(self) -> None:
        """Free all gradients."""
        self._unreduced = {}
        for parameter in self._held.values():
            parameter.grad = None

    def deliver(self, fresh: dict[str, Tensor], scale: Float[Tensor, ""], *, reduce: bool) -> None:
        """Multiply by ``scale``, reduce over dp (and tp, and tied stages), add to ``p.grad``; while an accumulation goes on, keep them."""
        if fresh and (scale.device.type != "cpu" or scale != 1):  # a number on a GPU is not waited for
            torch._foreach_mul_(list(fresh.values()), scale.to(next(iter(fresh.values()))))  # its dtype and device
        _add_to(fresh, self._unreduced)
        self._unreduced = {} if reduce else fresh
        if reduce:
            self._reduce(fresh)
            self._add(fresh)

    def reduce_in_place(self) -> None:
        """Reduce what a plain ``loss.backward()`` left in ``p.grad``, to the mean over dp as under DDP."""
        fresh = {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None and not is_reduced_by_fsdp(p)}
        if fresh and self._mesh.dims.dp > 1:
            torch._foreach_div_(list(fresh.values()), self._mesh.dims.dp)
            for name, gradient in add_up(fresh, self._mesh.dp_group).items():
                self._parameters[name].grad = local_as(gradient, self._parameters[name])

    def counted_once(self, of: Iterable[Tensor] | None = None) -> list[Tensor]:
        """The gradients in ``p.grad`` (of the parameters given, else of all), of tied copies only the first holder's."""
        wanted = None if of is None else {id(parameter) for parameter in of}
        return [p.grad for p in self.held_first().values() if p.grad is not None and (wanted is None or id(p) in wanted)]

    def held_first(self) -> dict[str, nn.Parameter]:
        """The parameters by name, of tied copies only the first holder's."""
        mine = self._mesh.coord.pp
        return {name: p for name, p in self._parameters.items() if self._tied.get(name, [mine])[0] == mine}

    def _add(self, fresh: Mapping[str, Tensor]) -> None:
        held = [(self._parameters[name], part) for name, part in fresh.items()]
        held += [(copy, fresh[name].clone()) for name, copy in self._copies.items() if name in fresh]  # each is clipped in place
        for parameter, part in held:
            gradient = local_as(part, parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _reduce(self, fresh: dict[str, Tensor]) -> None:
        tied = {name: holders for name, holders in self._tied.items() if name in self._parameters and self._parameters[name].requires_grad}
        for name in tied:
            fresh.setdefault(name, torch.zeros_like(local(self._parameters[name])))
        partial = {name: gradient for name, gradient in fresh.items() if name in self._partial}
        if partial:
            fresh |= add_up(partial, self._mesh.tp_group)
        copies = {name: gradient for name, gradient in fresh.items() if not is_reduced_by_fsdp(self._parameters[name])}
        if copies and self._mesh.dims.dp_cp > 1:
            fresh |= add_up(copies, self._mesh.dp_cp_group)
        exchange_tied(fresh, tied, self._mesh)


def _copy_of(name: str) -> str:
    return f"{name} (copy)"


def _add_to(sums: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Float[Tensor, ""], loss: Float[Tensor, ""], deliver: Callable[[Tensor], None]) -> Float[Tensor, ""]:
        ctx.deliver = deliver
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        if ctx.deliver is None:
            raise RuntimeError("backward() was called twice on one pipeline_step(): its gradients were handed over by the first call")
        ctx.deliver(grads[0])
        ctx.deliver = None
        return None, None, None


def hand_over(loss: Float[Tensor, ""], deliver: Callable[[Tensor], None]) -> Float[Tensor, ""]:
    """The loss as an autograd tensor whose backward(g) calls ``deliver(g)``, once."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _HandOver.apply(anchor, loss, deliver)
