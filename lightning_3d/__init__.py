"""Pretrain language models in PyTorch Lightning over data, tensor, pipeline and context parallelism.

Names are looked up when first used, so that `import lightning_3d` and `python -m lightning_3d --help` take milliseconds: torch and
Lightning together take seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_3d.callbacks import Checkpoint as Checkpoint
    from lightning_3d.callbacks import GarbageCollection as GarbageCollection
    from lightning_3d.callbacks import GradNorm as GradNorm
    from lightning_3d.callbacks import LayerStats as LayerStats
    from lightning_3d.callbacks import Memory as Memory
    from lightning_3d.callbacks import ProgressBar as ProgressBar
    from lightning_3d.callbacks import SkipBadSteps as SkipBadSteps
    from lightning_3d.callbacks import Stragglers as Stragglers
    from lightning_3d.callbacks import Summary as Summary
    from lightning_3d.callbacks import Throughput as Throughput
    from lightning_3d.checkpoint import latest_checkpoint as latest_checkpoint
    from lightning_3d.datamodule import NanosetDataModule as NanosetDataModule
    from lightning_3d.module import LlamaModule as LlamaModule
    from lightning_3d.pipeline_mixin import PipelineMixin as PipelineMixin
    from lightning_3d.strategy import ThreeDStrategy as ThreeDStrategy
    from lightning_3d.synthetic_datamodule import SyntheticDataModule as SyntheticDataModule
    from lightning_3d.text_datamodule import TextDataModule as TextDataModule

__version__ = "0.1.0"

_HOME = {
    "ThreeDStrategy": "strategy",
    "PipelineMixin": "pipeline_mixin",
    "LlamaModule": "module",
    "NanosetDataModule": "datamodule",
    "SyntheticDataModule": "synthetic_datamodule",
    "TextDataModule": "text_datamodule",
    "Checkpoint": "callbacks",
    "GarbageCollection": "callbacks",
    "GradNorm": "callbacks",
    "LayerStats": "callbacks",
    "Memory": "callbacks",
    "ProgressBar": "callbacks",
    "SkipBadSteps": "callbacks",
    "Stragglers": "callbacks",
    "Summary": "callbacks",
    "Throughput": "callbacks",
    "latest_checkpoint": "checkpoint",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_3d' has no attribute {name!r}")
    return getattr(import_module(f"lightning_3d.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
