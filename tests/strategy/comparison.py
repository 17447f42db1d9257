"""What ranks saw against what one process saw."""

from typing import Any

import torch

Seen = dict[str, Any]


def assert_same_training(ranks: list[Seen], plain: Seen, *, atol: float = 1e-12, losses: bool = True) -> None:
    """Gradients of every step and last weights, of every parameter of every rank; all parameters are on some rank."""
    assert set().union(*(seen["weights"] for seen in ranks)) == plain["weights"].keys()
    for step, gradients in enumerate(plain["gradients"]):
        assert set().union(*(seen["gradients"][step] for seen in ranks)) == gradients.keys()
    for rank, seen in enumerate(ranks):
        assert len(seen["gradients"]) == len(plain["gradients"]) == plain["step"] == seen["step"]
        for step, gradients in enumerate(seen["gradients"]):
            assert_close(gradients, plain["gradients"][step], atol, f"gradient in step {step} on rank {rank}")
        assert_close(seen["weights"], plain["weights"], 100 * atol, f"weight on rank {rank}")
        if losses:
            torch.testing.assert_close(seen["losses"], plain["losses"], rtol=0, atol=atol)


def assert_close(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], atol: float, what: str) -> None:
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{what}: {name}: {m}")
