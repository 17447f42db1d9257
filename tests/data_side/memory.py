"""What data costs in memory and start-up, measured in a process of its own: `python memory.py blend|shards FOLDER` prints JSON."""

import json
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np

from lightning_3d.data.shards import ShardWriter
from lightning_3d.datamodule import NanosetDataModule

S, SAMPLES = 512, 250_000_000  # of each set


def anonymous_mib(pid: str = "self") -> float:
    """Memory that is this process's own: neither a file's pages nor shared with the process it was forked from."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return min(values["Private_Dirty"], values["Anonymous"]) / 1024


def sparse(folder: Path) -> str:
    """A Nanoset of zeros that takes no space."""
    folder.mkdir()
    num_tokens = S * SAMPLES + 1
    with (folder / "00000_unshuffled.ds").open("wb") as file:
        file.truncate(2 * num_tokens)
    np.array([num_tokens], "<u8").tofile(folder / "00000_unshuffled.ds.index")
    (folder / "00000_unshuffled.ds.metadata").write_text(f"none|2\n{num_tokens}\n128.0 GT")
    return str(folder)


def blend(root: Path) -> dict[str, float]:
    """Open four sets of a quarter of 10^9 samples each, read a batch here and in four workers, far inside."""
    folders = [sparse(root / name) for name in "abcd"]
    list(NanosetDataModule(warm_up(root), 4, num_workers=0).train_dataloader())
    before, start = anonymous_mib(), time.process_time()
    module = NanosetDataModule(folders, S, 8, dataset_weights=[123_456_789, 98_765, 444_444_441, 17_777], mask_documents=True)
    assert next(iter(module.train_dataloader()))["input_ids"].shape == (8, S)
    result = {"seconds": time.process_time() - start, "mib": anonymous_mib() - before}
    module.num_workers, module._resumed_samples = 4, 900_000_000
    loader = iter(module.train_dataloader())
    for _ in range(64):
        next(loader)
    workers = [anonymous_mib(str(process.pid)) for process in multiprocessing.active_children()]
    return result | {"workers": len(workers), "worker_mib": max(workers)}


def warm_up(root: Path) -> str:
    """A small set, so that what importing and first use cost is not counted."""
    folder = root / "small"
    folder.mkdir()
    with ShardWriter(folder / "00000_unshuffled.ds", "none", 2) as shard:
        shard.append(np.arange(400))
    return str(folder)


def shards(root: Path) -> dict[str, float]:
    """2,000 small shards, 5,000 batches."""
    for number in range(2000):
        with ShardWriter(root / f"{number:05d}_unshuffled.ds", "none", 2) as shard:
            for _ in range(4):
                shard.append(np.arange(500) % 60_000)
    module = NanosetDataModule(str(root), 127, 4, mask_documents=True)
    sizes = []
    for number, _ in enumerate(module.train_dataloader()):
        if number % 1000 == 999:
            sizes.append(anonymous_mib())
    return {"batches": number + 1, "first_mib": sizes[1], "last_mib": sizes[-1]}


if __name__ == "__main__":
    print(json.dumps({"blend": blend, "shards": shards}[sys.argv[1]](Path(sys.argv[2]))))
