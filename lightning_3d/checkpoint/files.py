"""Shard files, in places of either kind (store.py): what torch.distributed.checkpoint writes to, and what reads them again.

A shard file is the bytes of tensors one after the other, `.metadata` says where each begins. Torch's own writer makes a zip file of each
tensor, which costs time and a copy in both directions; here bytes go straight between the file and the tensor's memory, and their
checksums are taken or compared on the way.
"""

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import groupby
from math import prod
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from lightning_3d.checkpoint.manifest import Entries, Manifest, Recorded, Sound
from lightning_3d.checkpoint.store import Place, to_disk
from lightning_3d.placement import local_chunk

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
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

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


@dataclass(frozen=True)
class Part:
    """Where saved tensor and wanted tensor overlap: whole rows of the saved one are read.

    Args:
        file: that holds it.
        offset: of the first row in there.
        shape: of the rows that are read.
        dtype: of what is in the file.
        wanted: which part of them.
        target: its place.
    """

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    wanted: tuple[slice, ...]
    target: Shaped[Tensor, "..."]

    def read(self, file: Sound) -> None:
        """Read straight to its place, or where columns, device or dtype differ beside it."""
        target = self.target
        alike = tuple(target.shape) == self.shape and target.dtype == self.dtype and target.device.type == "cpu"
        rows = target if alike and target.is_contiguous() else torch.empty(self.shape, dtype=self.dtype)
        file.read_into(self.offset, _memory(rows))
        if rows is not target:
            target.copy_(rows[self.wanted])


class Reader:
    """Reads the parts of shards that are asked for.

    Args:
        place: folder of the checkpoint.
    """

    def __init__(self, place: Place) -> None:
        self._manifest = Manifest(place)

    @cached_property
    def metadata(self) -> Metadata:
        """What is where."""
        return cast(Metadata, pickle.loads(self._manifest.read(METADATA_FILE)))

    def fill(self, state: dict[str, Any]) -> None:
        """Fill tensors in place, each rank its own part of those that are sharded; other values are replaced.

        Raises:
            DamagedCheckpointError: what was read is not what was written; tensors are filled in part.
        """
        parts: list[Part] = []
        for name, value in state.items():
            saved = self.metadata.state_dict_metadata[name]
            if isinstance(saved, TensorStorageMetadata):
                parts += self._parts(name, saved, value)
            else:
                state[name] = self._value(name)
        parts.sort(key=lambda part: (part.file, part.offset))
        size = max(1, -(-len(parts) // _THREADS))
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = [pool.submit(self._read, parts[i : i + size]) for i in range(0, len(parts), size)]
        for job in jobs:
            job.result()

    def _parts(self, name: str, saved: TensorStorageMetadata, wanted: Tensor) -> Iterator[Part]:
        own = (wanted.to_local() if isinstance(wanted, DTensor) else wanted).detach()
        offsets = local_chunk(wanted)[0] if isinstance(wanted, DTensor) else (0,) * own.dim()
        dtype = saved.properties.dtype
        for chunk in saved.chunks:
            ranges = zip(offsets, own.shape, chunk.offsets, chunk.sizes, strict=True)
            overlap = [(max(a, b), min(a + of_a, b + of_b)) for a, of_a, b, of_b in ranges]
            if any(begin >= end for begin, end in overlap):
                continue
            of_chunk, of_own = (
                tuple(slice(begin - origin, end - origin) for (begin, end), origin in zip(overlap, origins, strict=True))
                for origins in (chunk.offsets, offsets)
            )
            file, offset, _ = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            skipped_rows = sum(part.start for part in of_chunk[:1])  # of a number there are no rows
            rows = tuple(part.stop - part.start for part in of_chunk[:1])
            offset += skipped_rows * prod(chunk.sizes[1:]) * dtype.itemsize
            wanted_rows = (*(slice(None) for _ in rows), *of_chunk[1:])
            yield Part(file, offset, rows + tuple(chunk.sizes[1:]), dtype, wanted_rows, own[of_own])

    def _value(self, name: str) -> Any:
        file, offset, nbytes = self.metadata.storage_data[MetadataIndex(name)]
        content = bytearray(nbytes)
        with self._manifest.open(file) as opened:
            opened.read_into(offset, memoryview(content))
        return torch.load(BytesIO(content), weights_only=False)

    def _read(self, parts: list[Part]) -> None:
        """Read parts in their order in the files."""
        for name, of_file in groupby(parts, key=lambda part: part.file):
            with self._manifest.open(name) as file:
                for part in of_file:
                    part.read(file)


def _memory(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
