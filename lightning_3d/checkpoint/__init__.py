"""Sharded checkpoints on torch.distributed.checkpoint: any layout saves, any other loads."""

from lightning_3d.checkpoint.folder import is_whole, latest_checkpoint, step_folder
from lightning_3d.checkpoint.state import load_trainer_state, restore, save

__all__ = ["is_whole", "latest_checkpoint", "load_trainer_state", "restore", "save", "step_folder"]
