"""The blocks of a stage: what is sharded, recomputed and compiled one by one."""

from collections.abc import Iterator

from torch import nn


def blocks_of(stage: nn.Module) -> Iterator[nn.Module]:
    """The members of the stage's module lists and dicts."""
    for child in stage.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
