"""Sharded checkpoints on torch.distributed.checkpoint: any layout saves, any other loads."""

from lightning_3d.checkpoint.folder import clear_leftovers, is_whole, latest_checkpoint, remove, step_folder, whole_steps
from lightning_3d.checkpoint.loading import load_trainer_state, restore, restore_or_older
from lightning_3d.checkpoint.randomness import gather_random_states, put_random_states_back
from lightning_3d.checkpoint.saving import Saver
from lightning_3d.checkpoint.store import at

__all__ = [
    "Saver",
    "at",
    "clear_leftovers",
    "gather_random_states",
    "is_whole",
    "latest_checkpoint",
    "load_trainer_state",
    "put_random_states_back",
    "remove",
    "restore",
    "restore_or_older",
    "step_folder",
    "whole_steps",
]
