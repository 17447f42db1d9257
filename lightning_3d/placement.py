"""Which part of a tensor a rank holds, worked out here and not by DTensor.

Under fsdp with tp a dim may be cut twice: first over tp, then each part over dp. torch calls the second cut a strided shard, and its own
arithmetic (2.13) is off by some rows where the sizes do not divide: 61 rows over tp=2, then over dp=3, are (11, 11, 9) and
(10, 10, 10) by what FSDP does, (11, 11, 10) and (10, 10, 9) by what DTensor says. Initial weights and checkpoints need the truth.
"""

from torch.distributed.tensor import DTensor

Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def local_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where part ``index`` of ``parts`` of a dim of ``size`` begins and ends; the last parts may be short or empty, as in DTensor."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def local_chunk(tensor: DTensor) -> Chunk:
    """Offsets and sizes, in the whole tensor, of what this rank holds; a size may be 0."""
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "the tensor lies on other ranks"
    cuts = [(placement, axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for placement, axis in sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor")):  # strided shards were cut last
        dim = placement.dim  # type: ignore[attr-defined]
        start, end = local_range(sizes[dim], tensor.device_mesh.size(axis), coordinate[axis])
        offsets[dim] += start
        sizes[dim] = end - start
    assert tuple(sizes) == tuple(tensor.to_local().shape)
    return tuple(offsets), tuple(sizes)
