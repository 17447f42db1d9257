"""Sharded checkpoints on torch.distributed.checkpoint: any layout saves, any other loads."""

from lightning_3d.checkpoint.folder import clear_leftovers, is_whole, latest_checkpoint, remove, step_folder, whole_steps
from lightning_3d.checkpoint.state import load_trainer_state, restore, save

__all__ = [
    "clear_leftovers",
    "is_whole",
    "latest_checkpoint",
    "load_trainer_state",
    "remove",
    "restore",
    "save",
    "step_folder",
    "whole_steps",
]
