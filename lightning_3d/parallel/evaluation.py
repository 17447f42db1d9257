"""Forward only, through the same stages as training: validation, test and predict.

torch's ``schedule.eval()`` will not do: it divides live gradients, keeps activations, fails on V-shaped placements and is bound to
one number and shape of microbatches. Here each stage receives, computes and sends, microbatch by microbatch: the pipeline fills and drains.
The shapes that stages exchange are sent once for each new shape of microbatch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.mesh import Mesh
from lightning_3d.parallel.microbatch import signature
from lightning_3d.parallel.pipeline import StageWork


class EvaluationRunner:
    """Runs microbatches through this rank's stages (by number) without gradients.

    Shapes: whatever the stages exchange.
    Placement: each activation moves from its stage to the next.
    Communication: send and receive, pp, nbytes(activation) a microbatch and stage border; its shape and dtype once.
    Source: Huang et al. 2019 (GPipe), the forward part.
    """

    def __init__(self, stages: Mapping[int, nn.Module], num_stages: int, mesh: Mesh, work: StageWork) -> None:
        self._stages, self._num_stages, self._mesh, self._work = stages, num_stages, mesh, work
        self._metas: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def run(self, microbatches: list[Any], device: torch.device, consume: Callable[[int, Any], None]) -> None:
        """Call ``consume(number, output)`` for each microbatch, on the rank of the last stage."""
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for number, microbatch in enumerate(microbatches):
            for index, stage in sorted(self._stages.items()):
                key = (index, signature(microbatch))
                inputs = self._receive(key, device) if index else self._work.stage_inputs(microbatch)
                output = stage(*inputs, **self._work.stage_kwargs(microbatch))
                if index == self._num_stages - 1:
                    consume(number, output)
                else:
                    sent += self._send(key, output if isinstance(output, tuple) else (output,))
        for work, _ in sent:
            if work is not None:
                work.wait()

    def _peer(self, index: int) -> int:
        return dist.get_global_rank(self._mesh.pp_group, index % self._mesh.dims.pp)

    def _send(self, key: Any, outputs: tuple[Tensor, ...]) -> list[tuple[dist.Work | None, Tensor]]:
        peer, group = self._peer(key[0] + 1), self._mesh.pp_group
        if key not in self._metas:
            self._metas[key] = [(output.shape, output.dtype) for output in outputs]
            dist.send_object_list([self._metas[key]], peer, group=group)
        contiguous = [output.contiguous() for output in outputs]
        return [(dist.isend(output, peer, group=group), output) for output in contiguous]

    def _receive(self, key: Any, device: torch.device) -> tuple[Tensor, ...]:
        peer, group = self._peer(key[0] - 1), self._mesh.pp_group
        known = ("received", key)
        if known not in self._metas:
            box: list[Any] = [None]
            dist.recv_object_list(box, peer, group=group)
            self._metas[known] = box[0]
        buffers = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._metas[known])
        for buffer in buffers:
            dist.recv(buffer, peer, group=group)
        return buffers
