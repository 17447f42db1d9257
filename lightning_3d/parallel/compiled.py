"""torch.compile, block by block: one graph serves all blocks of a stage, and FSDP's hooks and the pipeline stay outside of it.

What a stage makes in its first forward and keeps (rotary tables) would be part of the first block's graph, and the others would want a
graph of their own; so that forward is not compiled.

Source: Liang et al. 2024 (TorchTitan), section 2.2.3 (regional compilation).
"""

import os
import shutil
import sys
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.blocks import blocks_of

Compile = bool | str  # a name is that of one of torch's backends


def check_compile(mode: Compile, device: torch.device) -> None:
    """Refuse what cannot be compiled here.

    Raises:
        ConfigError: an unknown backend, or no C++ compiler for CPUs.
    """
    if isinstance(mode, str) and mode not in torch.compiler.list_backends(exclude_tags=()):
        raise ConfigError(f"compile={mode!r}: choose true, false, or one of torch's backends {torch.compiler.list_backends()}")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if mode in (True, "inductor") and device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"compile={mode}: on CPUs it needs a C++ compiler, and {compiler} is not there: install it, name another in CXX, or set false"
        )


def compile_blocks(stage: nn.Module, mode: Compile, **settings: Any) -> None:
    """Compile a stage's blocks after its first forward; in place, so that all names stay. Settings are torch.compile's."""
    if not mode:
        return

    def compile_all(stage: nn.Module, args: Any, output: Any) -> None:
        first.remove()
        for block in blocks_of(stage):
            block.compile(backend=mode if isinstance(mode, str) else "inductor", **settings)

    first = stage.register_forward_hook(compile_all)
