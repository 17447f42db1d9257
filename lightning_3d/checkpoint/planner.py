"""What each rank writes: torch's plan, with the places of the shards as placement.py works them out."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch import Size
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_3d.placement import local_chunk


class SavePlanner(DefaultSavePlanner):
    """Each rank's shards at their true offsets; an empty one is left out, since its offset is another shard's.

    Args:
        copies: what to write, of the names in the state that this rank turns out to write; null: the state, which does not change.
    """

    def __init__(self, copies: Future[dict[str, Any]] | None = None) -> None:
        super().__init__()
        self._copies = copies
        self.written: set[str] | None = None  # by this rank, once all ranks have planned

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._copies is None else self._copies.result()[index.fqn]

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.written = {item.index.fqn for item in new_plan.items}
        return super().finish_plan(new_plan)

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [_placed(item, self.state_dict[item.index.fqn]) for item in plan.items]
        return replace(plan, items=[item for item in items if item is not None])


def _placed(item: WriteItem, value: Any) -> WriteItem | None:
    if not isinstance(value, DTensor):
        return item
    assert item.tensor_data is not None
    chunk = _chunk(value)
    if not chunk.sizes.numel():
        return None
    return replace(item, index=MetadataIndex(item.index.fqn, chunk.offsets), tensor_data=replace(item.tensor_data, chunk=chunk))


def _chunk(tensor: DTensor) -> ChunkStorageMetadata:
    offsets, sizes = local_chunk(tensor)
    return ChunkStorageMetadata(offsets=Size(offsets), sizes=Size(sizes))
