"""A batch is split into microbatches on every rank alike; any pytree of tensors will do."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ConfigError


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors in a pytree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cut every tensor on dim 0 into ``count`` parts; other leaves go to every part.

    Where ``count`` does not divide the size, the parts are ceil(size / count) long and the last is short.

    Raises:
        ConfigError: no tensors, a tensor without dims, or tensors of different sizes on dim 0.
    """
    leaves, spec = pytree.tree_flatten(batch)
    sizes = {tuple(leaf.shape[:1]) for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or sizes == {()}:
        found = sorted(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
        raise ConfigError(f"a batch with tensors of shapes {found} cannot be split on dim 0: override split_batch() in your module")
    ((size,),) = sizes
    length = -(-size // count)
    parts = [leaf.split(length) if isinstance(leaf, Tensor) else None for leaf in leaves]
    numbers = range(-(-size // length))
    picked = ([leaf if part is None else part[i] for leaf, part in zip(leaves, parts, strict=True)] for i in numbers)
    return [pytree.tree_unflatten(part, spec) for part in picked]


def check_equal(microbatches: list[Any], count: int) -> None:
    """Whether training can run them: ``count`` microbatches of one shape.

    Raises:
        ConfigError: naming the sizes.
    """
    sizes = [leaves[0].shape[0] if (leaves := tensor_leaves(part)) and leaves[0].dim() else 1 for part in microbatches]
    if len(microbatches) != count or len({signature(part) for part in microbatches}) > 1:
        raise ConfigError(
            f"batch_accumulation_per_replica={count} does not divide the batch of {sum(sizes)} sequences (microbatches of {sizes}): "
            "make the batch of each dp replica micro_batch_size x batch_accumulation_per_replica (drop_last=True for a short last batch)"
        )


def signature(tree: Any) -> tuple[Any, ...]:
    """What a schedule is bound to: shapes and dtypes, and the autocast that decides the dtype of activations."""
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensor_leaves(tree))
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return (shapes, autocast, torch.get_default_dtype())
