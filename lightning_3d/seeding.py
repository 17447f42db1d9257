"""One seed, one model: every layout starts from bitwise the same weights.

A device mesh cannot help here: DTensor's random generator gives every rank of a gloo mesh the same numbers for different
shards. So each module draws its parameters at their full shape, on the CPU, from a generator seeded by (seed, name of the
module), and each rank keeps its slice. The cost is one module's full parameters at a time, and about 12 ns an element.
"""

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ConfigError
from lightning_3d.placement import local_chunk

Region = tuple[slice, ...]  # of a tensor, one for each dim


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed of its own for every name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def materialise(root: nn.Module, seed: int, device: torch.device) -> None:
    """Give the meta parameters of ``root`` memory on ``device`` and their initial values, the same in every layout.

    Raises:
        ConfigError: a module that owns parameters or buffers but has no ``reset_parameters()`` to draw them.
    """
    owners = {name: module for name, module in root.named_modules() if _owned(module)}
    for name, module in owners.items():
        if not hasattr(module, "reset_parameters"):
            raise ConfigError(
                f"{type(module).__name__} at '{name}' owns {sorted(_owned(module))} but has no reset_parameters(): define it, so that "
                "the weights can be drawn after the model was built on the meta device"
            )
    _to_empty(root, device)
    for name, module in owners.items():
        for key, value in _draw(module, seed_of(seed, name)).items():
            _copy_slice(value, _owned(module)[key])


@torch.no_grad()
def fill(root: nn.Module, device: torch.device, read: Callable[[str, Region], Tensor]) -> None:
    """Give the meta parameters of ``root`` memory on ``device`` and what ``read`` finds there; a rank asks for its own regions only."""
    _to_empty(root, device)
    for name, parameter in root.named_parameters():
        whole = (0,) * parameter.dim(), tuple(parameter.shape)
        offsets, sizes = local_chunk(parameter) if isinstance(parameter, DTensor) else whole
        if all(sizes):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(read(name, tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))))


def _to_empty(root: nn.Module, device: torch.device) -> None:
    """``root.to_empty(device)``, except that a parameter which two modules share stays one parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module, key))
    root.to_empty(device=device)
    for (first, first_key), *others in places.values():
        for module, key in others if first._parameters[first_key] is not None else ():
            module._parameters[key] = first._parameters[first_key]


def _owned(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@torch.no_grad()
def _draw(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The module's own tensors at full shape on the CPU, from a generator of its own."""
    whole = copy.copy(module)
    whole._parameters = {k: p if p is None else nn.Parameter(_empty(p), p.requires_grad) for k, p in module._parameters.items()}
    whole._buffers = {k: b if b is None else _empty(b) for k, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        whole.reset_parameters()  # type: ignore[operator]
    return {key: tensor.detach() for key, tensor in _owned(whole).items()}


def _empty(tensor: Tensor) -> Tensor:
    # nan, not garbage: a parameter that reset_parameters() forgets must not look like a weight.
    return torch.full(tensor.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device="cpu")


@torch.no_grad()
def _copy_slice(whole: Tensor, target: Tensor) -> None:
    if isinstance(target, DTensor):
        for dim, (offset, size) in enumerate(zip(*local_chunk(target), strict=True)):
            whole = whole.narrow(dim, offset, size)
        target.to_local().copy_(whole)
    else:
        target.copy_(whole)
