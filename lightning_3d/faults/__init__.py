"""What a person sees when a run goes wrong: one error with its place, a log for each rank, who waits for whom."""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_3d.errors import ConfigError
from lightning_3d.faults.first_error import FirstError
from lightning_3d.faults.place import place_of_thread
from lightning_3d.faults.rank_log import RankLog
from lightning_3d.faults.watchdog import Watchdog
from lightning_3d.mesh import Mesh, ParallelDims

__all__ = ["Faults"]


class Faults:
    """The log, the watchdog and the time limits of this rank.

    Args:
        timeout_s: limit for a collective once the first step is done.
        first_step_timeout_s: limit until then, for what is compiled, read and connected.

    Raises:
        ConfigError: a limit that is none.
    """

    def __init__(self, timeout_s: float, first_step_timeout_s: float) -> None:
        for key, value in (("timeout_s", timeout_s), ("first_step_timeout_s", first_step_timeout_s)):
            if not value > 0:
                raise ConfigError(f"{key}={value}: give a number of seconds above 0")
        self.timeout_s, self.first_s = timeout_s, max(timeout_s, first_step_timeout_s)
        self._mesh: Mesh | None = None
        self._log: RankLog | None = None
        self._watchdog: Watchdog | None = None
        self._first_step: int | None = None

    def prepare(self, root: str, device: torch.device) -> None:
        """Before processes are connected: have NCCL keep its last calls, and write them when one takes too long."""
        if device.type == "cuda" and "://" not in root:
            folder = Path(root).absolute() / "ranks"
            folder.mkdir(parents=True, exist_ok=True)
            recorder = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/nccl-"}
            for name, value in recorder.items():
                os.environ.setdefault(name, value)

    def watch(self, mesh: Mesh, store: dist.TCPStore | None, module: nn.Module, root: str, end_others: Callable[[], None]) -> None:
        """Begin, once processes are connected; nothing where there is but one."""
        if store is None or self._watchdog is not None:
            return
        rank, names = dist.get_rank(), rank_names(mesh.dims)
        self._mesh, self._first_step = mesh, None
        self._log = RankLog(root, rank)
        self._log.attach()
        first_error = FirstError(store, names[rank], module, self._log, end_others)
        first_error.install()
        own = dist.TCPStore(store.host, store.port, is_master=False)  # a client answers one question at a time
        main = threading.main_thread().ident or 0
        self._watchdog = Watchdog(
            own, rank, names, lambda: place_of_thread(main, module), self.first_s, self._log.write_stacks, first_error.give_up
        )
        self._watchdog.start()
        self._limit(self.first_s)

    def beat(self, step: int | None = None) -> None:
        """A batch begins; with the number of steps that training has done."""
        if self._watchdog is None:
            return
        self._watchdog.beat()
        if step is not None:
            self._first_step = step if self._first_step is None else self._first_step
            if step > self._first_step and self._watchdog.limit_s != self.timeout_s:
                self._limit(self.timeout_s)

    def close(self) -> None:
        """At the end of a run."""
        if self._watchdog is not None and self._log is not None:
            self._watchdog.stop()
            self._watchdog = None
            self._log.detach()

    def _limit(self, seconds: float) -> None:
        assert self._mesh is not None
        assert self._watchdog is not None
        self._watchdog.limit_s = seconds
        for group in groups_of(self._mesh):  # torch gives groups of a mesh 30 minutes, whatever that of the world has
            _set_pg_timeout(timedelta(seconds=seconds), group)


def groups_of(mesh: Mesh) -> Iterable[dist.ProcessGroup]:
    """The world, and the groups of all axes."""
    groups = [dist.group.WORLD, *mesh.device_mesh.get_all_groups(), *mesh.parameter_mesh.get_all_groups()]
    return {id(group): group for group in groups if group is not None}.values()


def rank_names(dims: ParallelDims) -> list[str]:
    """For each rank its number and its coord, by the axes that have more than one."""
    sizes = asdict(dims)
    return [_name(rank, {axis: at for axis, at in asdict(dims.coord(rank)).items() if sizes[axis] > 1}) for rank in range(dims.world_size)]


def _name(rank: int, coord: dict[str, int]) -> str:
    return f"rank {rank} ({', '.join(f'{axis}={at}' for axis, at in coord.items())})"
