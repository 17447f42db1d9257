"""Which part of a tensor a rank holds, worked out here and not by DTensor.

Under fsdp with tp a dim may be cut twice: first over tp, then each part over dp. torch calls the second cut a strided shard, and its own
arithmetic (2.13) is off by some rows where the sizes do not divide: 61 rows over tp=2, then over dp=3, are (11, 11, 9) and
(10, 10, 10) by what FSDP does, (11, 11, 10) and (10, 10, 9) by what DTensor says. Initial weights and checkpoints need the truth.
"""

from torch.distributed.tensor import DTensor

from lightning_3d.errors import ConfigError

SEQUENCE_IDS = "sequence_ids"  # key of a batch that holds one rank's part of each sequence alone: the places of its tokens

Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def local_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where part ``index`` of ``parts`` of a dim of ``size`` begins and ends; the last parts may be short or empty, as in DTensor."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def head_tail(length: int, parts: int, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the two chunks of a sequence begin and end that a rank of a context-parallel group holds: of 2 x ``parts`` equal ones, the
    ``index``-th from the front and the ``index``-th from the back, so that under a causal mask all ranks have the same work.

    Raises:
        ConfigError: the sequence does not divide.
    """
    if length % (2 * parts):
        raise ConfigError(
            f"sequence_length={length} is not divisible by 2 x cp = {2 * parts}, as two chunks of it on each of cp={parts} ranks need: "
            "change one"
        )
    chunk = length // (2 * parts)
    last = length - index * chunk
    return (index * chunk, (index + 1) * chunk), (last - chunk, last)


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
