"""Callbacks for any Lightning Trainer; under ThreeDStrategy they read the whole model's numbers from it."""

from lightning_3d.callbacks.checkpoint import Checkpoint
from lightning_3d.callbacks.garbage_collection import GarbageCollection
from lightning_3d.callbacks.grad_norm import GradNorm
from lightning_3d.callbacks.layer_stats import LayerStats
from lightning_3d.callbacks.memory import Memory
from lightning_3d.callbacks.progress_bar import ProgressBar
from lightning_3d.callbacks.skip_bad_steps import SkipBadSteps
from lightning_3d.callbacks.stragglers import Stragglers
from lightning_3d.callbacks.summary import Summary
from lightning_3d.callbacks.throughput import Throughput

__all__ = [
    "Checkpoint",
    "GarbageCollection",
    "GradNorm",
    "LayerStats",
    "Memory",
    "ProgressBar",
    "SkipBadSteps",
    "Stragglers",
    "Summary",
    "Throughput",
]
