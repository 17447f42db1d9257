"""Checksums of blocks: what is read is checked, to the ends of the blocks that it lies in, and nothing else is."""

import random
from pathlib import Path

import pytest

from lightning_3d.checkpoint.manifest import Manifest, Recorded, damage, write_manifest
from lightning_3d.errors import ConfigError, DamagedCheckpointError

BLOCK = 4 << 20
SIZE = 2 * BLOCK + 12345


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def folder(content: bytes, tmp_path: Path) -> Path:
    """One file, written in pieces of every size."""
    draw, begin = random.Random(2), 0
    with (tmp_path / "shard").open("wb") as file:
        recorded = Recorded(file)
        while begin < SIZE:
            begin += recorded.write(content[begin : begin + draw.choice([1, 1000, BLOCK // 2, BLOCK + 1])])
    write_manifest(tmp_path, {"shard": recorded.entry()})
    return tmp_path


def read(folder: Path, *parts: tuple[int, int]) -> list[bytes]:
    targets = [bytearray(size) for _, size in parts]
    with Manifest(folder).open("shard") as file:
        for (offset, _), target in zip(parts, targets, strict=True):
            file.read_into(offset, memoryview(target))
    return [bytes(target) for target in targets]


def test_any_part_can_be_read(folder: Path, content: bytes) -> None:
    assert damage(folder) is None
    assert Manifest(folder).read("shard") == content
    draw = random.Random(3)
    offsets = [0, BLOCK - 1, BLOCK, SIZE - 1, 5, *(draw.randrange(SIZE) for _ in range(20))]
    parts = [(offset, draw.randrange(1, SIZE - offset + 1)) for offset in offsets]
    assert read(folder, *parts) == [content[offset : offset + size] for offset, size in parts]


@pytest.mark.parametrize("at", [BLOCK, BLOCK + 100, 2 * BLOCK - 1])
def test_a_block_is_checked_whatever_is_read_of_it(folder: Path, content: bytes, at: int) -> None:
    with (folder / "shard").open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    assert damage(folder) == "shard is not what was written: its checksum is another"
    assert read(folder, (5, 10), (2 * BLOCK, 10)) == [content[5:15], content[2 * BLOCK : 2 * BLOCK + 10]]
    for part in ((BLOCK + 50, 10), (BLOCK - 1, 2), (0, SIZE), (2 * BLOCK - 1, 1)):
        with pytest.raises(DamagedCheckpointError, match="shard is not what was written"):
            read(folder, part)


def test_another_version_is_refused_by_name(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ConfigError, match="has a manifest of version 1, this lightning_3d reads 2: use the one that wrote it"):
        Manifest(folder)
