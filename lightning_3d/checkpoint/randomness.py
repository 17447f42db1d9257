"""The random numbers to come: each rank's generators, so that dropout after a resume is that of the run that went on.

They belong to a rank of a layout. Another layout draws other masks whatever one does, so there the generators stay as `seed_everything`
left them.
"""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_3d.checkpoint.state import State, rank, world_size

RANDOM_STATES = "random_states"  # key in trainer.pt


def gather_random_states(layout: str) -> State:
    """Every rank's generators, on rank 0.

    Shapes: none.
    Placement: each rank's states -> all of them on rank 0.
    Communication: gather, world, some KiB a rank.
    Source: this project.
    """
    states: list[Any] | None = [_own()]
    if world_size() > 1:
        states = [None] * world_size() if rank() == 0 else None
        dist.gather_object(_own(), states)
    return {"layout": layout, "states": states}


def put_random_states_back(trainer_state: State, layout: str) -> bool:
    """Set this rank's generators, if they were saved by a rank of the same layout; whether they were."""
    saved = trainer_state[RANDOM_STATES]
    if saved["layout"] != layout:
        return False
    own = saved["states"][rank()]
    torch.set_rng_state(own["torch"])
    random.setstate((own["python"][0], tuple(own["python"][1].tolist()), own["python"][2]))
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if own["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["device"])
    return True


def _own() -> State:
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
