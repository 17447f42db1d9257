"""The blocks of a stage: what is sharded, recomputed and compiled one by one."""

from collections.abc import Iterator

from torch import nn


def named_blocks(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the stage's module lists and dicts, with their names in the stage."""
    for name, child in stage.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{key}", block) for key, block in child.named_children())


def blocks_of(stage: nn.Module) -> Iterator[nn.Module]:
    """The same without names."""
    return (block for _, block in named_blocks(stage))
