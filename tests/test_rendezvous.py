"""Starts of one set of ranks after another, over one store, as torchrun keeps it; ranks are threads, each with a connection of its own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_3d.rendezvous import fresh_store

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)


def start(server: dist.TCPStore, world_size: int, timeout: timedelta = TIMEOUT) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: fresh_store(client(server), rank, world_size, timeout), reversed(range(world_size))))


def test_each_start_has_a_store_of_its_own(server: dist.TCPStore) -> None:
    """With other numbers of ranks, and after one that ended when some had come, the first among them or not."""
    first = start(server, 3)
    first[0].set("address", "of the dead")
    assert [store.get("address") for store in first] == [b"of the dead"] * 3
    server.add("tickets", 2)  # two ranks that ended before rank 0 was there
    with pytest.raises(RuntimeError, match="only 1 of 3 ranks came"):
        fresh_store(client(server), 0, 3, timedelta(seconds=0.1))
    for world_size in (3, 1, 4):
        stores = start(server, world_size)
        assert not any(store.check(["address"]) for store in stores)
        stores[-1].set("address", "of the living")
        assert [store.get("address") for store in stores] == [b"of the living"] * world_size


def test_no_one_to_answer(server: dist.TCPStore) -> None:
    start(server, 2)
    with pytest.raises(dist.DistError):
        fresh_store(client(server), 1, 2, timedelta(seconds=0.2))
