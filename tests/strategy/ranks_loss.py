"""What users do to a loss before they return it."""

from typing import Any

import torch
from ranks_gpt import GPT
from torch import Tensor
from torch.distributed.tensor import DTensor


class Quarter(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.25 * super().training_step(batch, batch_idx)


def own_part(parameter: Tensor) -> Tensor:
    """As a user writes it, with its gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Decayed(GPT):
    """An L2 term of the module's own parameters: each rank adds that of its own stages, by ordinary autograd."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.03 * torch.stack([own_part(parameter).pow(2).sum() for parameter in self.parameters()]).sum()


class Twice(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return (super().training_step(batch, batch_idx) + self.pipeline_step((targets, inputs))[0]) / 2


class Manual(GPT):
    """Two backward passes a step, of which the first is weighted; gradients clipped by hand; every second step keeps adding up."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        inputs, targets = batch
        self.manual_backward(0.5 * self.pipeline_step(batch)[0])
        self.manual_backward(self.pipeline_step((targets, inputs))[0])
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Toggled(GPT):
    """Manual accumulation as Lightning documents it: gradients are exchanged with the last batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.pipeline_step(batch)[0] / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class KeepsGradients(GPT):
    """Gradients add up over all batches: zero_grad does nothing."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


class TwoOptimizers(GPT):
    """Each optimizer's gradients are clipped by their own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(self.pipeline_step(batch)[0])
        for optimizer, limit in zip(optimizers, (0.05, 0.02), strict=True):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        biases = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        return torch.optim.SGD(biases, 0.1), torch.optim.SGD(others, 0.1)


class BackwardTwice(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=True)
        return loss
