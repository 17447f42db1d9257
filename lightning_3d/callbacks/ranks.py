"""Small numbers of all ranks, for callbacks."""

import torch
import torch.distributed as dist
from jaxtyping import Float
from lightning.pytorch import Trainer
from torch import Tensor


def gather(trainer: Trainer, numbers: list[float]) -> Float[Tensor, "ranks N"]:
    """What each rank has, on all of them.

    Shapes: N numbers -> (ranks, N).
    Placement: each rank's -> replicated over the world.
    Communication: all-gather, world, 8 N bytes a rank.
    Source: this project.
    """
    mine = torch.tensor([numbers], dtype=torch.float64, device=trainer.strategy.root_device)
    if trainer.world_size == 1:
        return mine.cpu()
    everyone = mine.new_empty(trainer.world_size, len(numbers))
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.cpu()


def rank_name(trainer: Trainer, rank: int) -> str:
    """The rank with its coord on the axes that have more than one, where the strategy has a mesh."""
    dims = getattr(trainer.strategy, "dims", None)
    if dims is None:
        return f"rank {rank}"
    coord = ", ".join(f"{axis}={at}" for axis, at in vars(dims.coord(rank)).items() if getattr(dims, axis) > 1)
    return f"rank {rank} ({coord})"
