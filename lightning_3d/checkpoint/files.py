"""What torch.distributed.checkpoint writes to and reads from, in places of either kind (store.py).

A shard file is the bytes of tensors one after the other, `.metadata` says where each begins. Torch's own writer makes a zip file of each
tensor, which costs time and a copy in both directions; here bytes go straight between the file and the tensor's memory, and their
checksums are taken or compared on the way.
"""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_3d.checkpoint.manifest import Entries, Manifest, Recorded, Sound
from lightning_3d.checkpoint.store import Place, to_disk

METADATA_FILE = ".metadata"
_ALIGNED_NBYTES = 64  # tensors begin at multiples of it, as they do in memory: else copying takes half as long again
_THREADS = 4  # that read: of a store each request takes its time, of a disk it is a core that copies


class Writer(dcp.StorageWriter):
    """Writes a rank's shards, and on rank 0 what is where.

    Args:
        place: where; it is empty.
        rank: of this process.
    """

    def __init__(self, place: Place, rank: int) -> None:
        self._place, self._rank = place, rank
        self.entries: Entries = {}  # of this rank's files

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One for each checkpoint."""

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Its place is there."""

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, name, offset = [], f"__{self._rank}_0.distcp", 0
        if plan.items:
            with (self._place / name).open("wb") as file:
                recorded = Recorded(file)
                for item in plan.items:
                    data = planner.resolve_data(item)
                    nbytes = recorded.write(_memory(data.detach().cpu().contiguous()) if isinstance(data, Tensor) else data.getbuffer())
                    results.append(WriteResult(item.index, nbytes, (name, offset, nbytes)))
                    offset += nbytes + recorded.write(bytes(-nbytes % _ALIGNED_NBYTES))
                to_disk(file)
            self.entries[name] = recorded.entry()
        return _done(results)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        with (self._place / METADATA_FILE).open("wb") as file:
            recorded = Recorded(file)
            recorded.write(pickle.dumps(metadata))
            to_disk(file)
        self.entries[METADATA_FILE] = recorded.entry()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(dcp.StorageReader):
    """Reads the parts of shards that are asked for.

    Args:
        place: folder of the checkpoint.

    Raises:
        DamagedCheckpointError: from all that reads, if what it read is not what was written.
    """

    def __init__(self, place: Place) -> None:
        self._manifest = Manifest(place)
        self._metadata: Metadata | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One for each checkpoint."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = pickle.loads(self._manifest.read(METADATA_FILE))
        return self._metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """It knows its metadata."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        where = self.read_metadata().storage_data
        items = sorted(plan.items, key=lambda item: where[item.storage_index])
        part = max(1, -(-len(items) // _THREADS))
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = [pool.submit(self._read_items, items[i : i + part], planner) for i in range(0, len(items), part)]
        for each in parts:
            each.result()
        return _done(None)

    def _read_items(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read items in their order in the files."""
        where = self.read_metadata().storage_data
        for name, of_file in groupby(items, key=lambda item: where[item.storage_index][0]):
            pickled = []
            with self._manifest.open(name) as file:
                for item in of_file:
                    _, offset, nbytes = where[item.storage_index]
                    if item.type == LoadItemType.BYTE_IO:
                        pickled.append((item, bytearray(nbytes)))
                        file.read_into(offset, memoryview(pickled[-1][1]))
                    else:
                        target = planner.resolve_tensor(item).detach()
                        self._fill(target, item, file, offset)
                        planner.commit_tensor(item, target)
            for item, content in pickled:  # once it is known to be what was written
                planner.load_bytes(item, BytesIO(content))

    def _fill(self, target: Tensor, item: ReadItem, file: Sound, offset: int) -> None:
        """Read the rows of a saved chunk that hold what is wanted: to their place, or where columns, device or dtype differ beside."""
        saved = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        assert item.storage_index.index is not None
        dtype, sizes = saved.properties.dtype, saved.chunks[item.storage_index.index].sizes
        if not target.numel():
            return
        rows = item.lengths[:1]  # none of a tensor without dims
        offset += sum(item.storage_offsets[:1]) * prod(sizes[1:]) * dtype.itemsize
        straight = item.lengths[1:] == sizes[1:] and target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        read = target if straight else torch.empty(rows + sizes[1:], dtype=dtype)
        file.read_into(offset, _memory(read))
        if not straight:
            for dim in range(1, len(sizes)):
                read = read.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target.copy_(read)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _memory(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
