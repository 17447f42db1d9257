"""Under torchrun, a place to meet that no earlier start has left anything in.

torchrun keeps one store over all restarts, and a process group looks there for addresses under the same names each time: after a restart it
may find those of processes that are dead, and fail or wait for them (pytorch issue 135712). The count of restarts would not tell starts
apart, since each agent has its own. So rank 0 draws a name for this start and gives it to whoever asks with a ticket of its own.
"""

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch.distributed.constants import default_pg_timeout

POLL_S = 0.01


def connect_under_torchrun(environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta | None) -> None:
    """Make the process group as Lightning does, which then finds it made, where torchrun keeps the store; else nothing.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    timeout = timeout or default_pg_timeout
    kept = dist.TCPStore(environment.main_address, environment.main_port, is_master=False, timeout=timeout)
    store = fresh_store(kept, environment.global_rank(), environment.world_size(), timeout)
    device_id = None if device.type == "cpu" else device
    _init_dist_connection(environment, backend, store=store, timeout=timeout, device_id=device_id)


def fresh_store(kept: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to this start alone, the same for all ranks of it.

    Shapes: none.
    Placement: a name that rank 0 draws -> all ranks.
    Communication: through the store, some bytes a rank.
    Source: this project.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    if rank:
        answer = f"name_for_{kept.add('tickets', 1)}"
        kept.wait([answer], timeout)
        own = dist.PrefixStore(kept.get(answer).decode(), kept)
        own.add("arrived", 1)
        return own
    name, answered, deadline = uuid.uuid4().hex, 0, time.monotonic() + timeout.total_seconds()
    own = dist.PrefixStore(name, kept)
    while own.add("arrived", 0) < world_size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {own.add('arrived', 0) + 1} of {world_size} ranks came within {timeout}")
        for ticket in range(answered, tickets := kept.add("tickets", 0)):  # tickets of the dead too: nobody reads those answers
            kept.set(f"name_for_{ticket + 1}", name)
        answered = tickets
        time.sleep(POLL_S)
    return own
