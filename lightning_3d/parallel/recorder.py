"""What ranks send each other, counted: every collective and message that passes through torch.distributed, with its axis and its bytes.

    with Recorder(trainer.strategy.mesh) as recorder:
        ...
    print(recorder)

It sees what our code calls, what FSDP, DTensor and pipelining call, and functional collectives, in forwards and backwards, since all of
them pass torch's dispatcher. Each operation of a step costs a call into Python meanwhile, so it is for tests and for looking, not for
training. A step inside a function that torch.compile has compiled is seen as far as its collectives are not compiled away.

Bytes are those of the whole tensor: what goes into an all-reduce or reduce-scatter, what comes out of an all-gather, what is sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.mesh import CP, DP, PP, REPLICATE, SHARD, TP, Mesh

_OPS = {  # the first one found in an operator's name without underscores
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "barrier": "barrier",
}


class Call(NamedTuple):
    """One collective or message of this rank.

    ``axis`` is "dp", "tp" and so on, "world", or the name of another group; an axis as large as the world may be one group with it.
    """

    op: str
    axis: str
    nbytes: int


class Recorder(TorchDispatchMode):
    """Within, ``calls`` grows by each collective and message of this rank, in order.

    Args:
        mesh: whose axes name the groups; None: only the world has a name.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        world = dist.group.WORLD
        self._axes = ({} if world is None else {world.group_name: "world"}) | ({} if mesh is None else _axes(mesh))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = func._schema.name.split("::")[1].replace("_", "")
            op = next((op for part, op in _OPS.items() if part in name), None)
            if op is not None:
                self.calls.append(Call(op, self._axis(args), max(map(_nbytes, (*args, result)))))
        return result

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of calls by op and axis."""
        return dict(sorted(Counter((call.op, call.axis) for call in self.calls).items()))

    def nbytes(self) -> dict[tuple[str, str], int]:
        """Bytes by op and axis."""
        sums: Counter[tuple[str, str]] = Counter()
        for call in self.calls:
            sums[call.op, call.axis] += call.nbytes
        return dict(sorted(sums.items()))

    def __str__(self) -> str:
        sizes = self.nbytes()
        return "\n".join(f"{op:14} {axis:8} {count:6,} {sizes[op, axis]:16,} bytes" for (op, axis), count in self.counts().items())

    def _axis(self, args: Sequence[Any]) -> str:
        named = [arg for arg in args if isinstance(arg, str)]  # functional ones name their group, last
        groups = [
            dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        ]
        name = groups[0].group_name if groups else named[-1] if named else ""
        return self._axes.get(name, name)


def _axes(mesh: Mesh) -> dict[str, str]:
    short = {PP: "pp", DP: "dp_cp", CP: "cp", TP: "tp", REPLICATE: "dp_replicate", SHARD: "dp_shard"}
    axes: dict[str, str] = {}
    for each in (mesh.dp_cp_mesh, mesh.parameter_mesh, mesh.device_mesh):  # one object where there is no cp and no hsdp
        short |= {DP: "dp"} if each is mesh.device_mesh else {}
        axes |= {each.get_group(name).group_name: short[name] for name in each.mesh_dim_names or ()}
    return axes


def _nbytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
