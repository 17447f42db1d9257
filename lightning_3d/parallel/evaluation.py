"""Forward only, through the same stages as training: validation, test and predict.

torch's ``schedule.eval()`` will not do: it divides live gradients, keeps activations, fails on V-shaped placements and is bound to
one number and shape of microbatches. Here all ranks walk through one list of forwards: a rank computes its own, sends what it computed to
the next stage, and receives what others send it at the place in the list where they do, so that no two ranks order their messages
differently. The shapes that stages exchange are sent once for each new shape of microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.mesh import Mesh
from lightning_3d.parallel.microbatch import signature
from lightning_3d.parallel.pipeline import StageWork
from lightning_3d.parallel.timeline import forward_order

Pending = list[tuple[dist.Work | None, Tensor]]


class EvaluationRunner:
    """Runs microbatches through this rank's stages (by number) without gradients.

    Args:
        stages: this rank's, by their number in the pipeline.
        stage_coords: pp coord of each stage of the pipeline.

    Shapes: whatever the stages exchange.
    Placement: each activation moves from its stage to the next.
    Communication: send and receive, pp, nbytes(activation) a microbatch and border of two ranks; its shape and dtype once.
    Source: Huang et al. 2019 (GPipe), the forward part.
    """

    def __init__(self, stages: Mapping[int, nn.Module], stage_coords: Sequence[int], mesh: Mesh, work: StageWork) -> None:
        self._stages, self._coords, self._mesh, self._work = stages, stage_coords, mesh, work
        self._metas: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def run(self, microbatches: list[Any], device: torch.device, consume: Callable[[int, Any], None]) -> None:
        """Call ``consume(number, output)`` for each microbatch, in order, on the rank of the last stage."""
        sent: Pending = []
        arrived: dict[tuple[int, int], Pending] = {}  # by stage and microbatch
        last = len(self._coords) - 1
        for index, _, number in forward_order(self._coords, len(microbatches)):
            key, following = (index + 1, signature(microbatches[number])), (index + 1, number)
            if index in self._stages:
                output = self._forward(index, microbatches[number], arrived.pop((index, number), []))
                outputs = output if isinstance(output, tuple) else (output,)
                if index == last:
                    consume(number, output)
                elif index + 1 in self._stages:
                    arrived[following] = [(None, tensor) for tensor in outputs]
                else:
                    sent += self._send(key, outputs)
            elif index + 1 in self._stages:
                arrived[following] = self._receive(key, device)
        _wait(sent)

    def _forward(self, index: int, microbatch: Any, arrived: Pending) -> Any:
        inputs = _wait(arrived) if index else self._work.stage_inputs(microbatch)
        return self._stages[index](*inputs, **self._work.stage_kwargs(microbatch))

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._mesh.pp_group, self._coords[stage])

    def _send(self, key: Any, outputs: tuple[Tensor, ...]) -> Pending:
        peer, group = self._peer(key[0]), self._mesh.pp_group
        if key not in self._metas:
            self._metas[key] = [(output.shape, output.dtype) for output in outputs]
            dist.send_object_list([self._metas[key]], peer, group=group)
        contiguous = [output.contiguous() for output in outputs]
        return [(dist.isend(output, peer, group=group), output) for output in contiguous]

    def _receive(self, key: Any, device: torch.device) -> Pending:
        peer, group = self._peer(key[0] - 1), self._mesh.pp_group
        if key not in self._metas:
            box: list[Any] = [None]
            dist.recv_object_list(box, peer, group=group)
            self._metas[key] = box[0]
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._metas[key]]
        return [(dist.irecv(buffer, peer, group=group), buffer) for buffer in buffers]


def _wait(pending: Pending) -> tuple[Tensor, ...]:
    for work, _ in pending:
        if work is not None:
            work.wait()
    return tuple(tensor for _, tensor in pending)
