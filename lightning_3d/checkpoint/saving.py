"""Writing a checkpoint: in the foreground, or while training goes on.

In the background the state is copied first, and a thread then writes the copies; the ranks talk to each other over a process group of
their own, since collectives of two threads on one group would mix. One save at most is in flight. The first save finds out which rank
writes what several of them hold; from then on each copies only what it will write.

Training waits for the copy of the weights, which a hook or a training_step may write to. The optimizers' state, two thirds with Adam, is
written to by their steps alone: the thread copies it beside the next forward and backward, and the step waits for what is left.

Whatever goes wrong on one rank (a full disk), all ranks hear of it: the save is abandoned on all of them and says so.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_3d.checkpoint.files import Writer
from lightning_3d.checkpoint.folder import TRAINER_FILE, abandon, begin, commit, is_foreign, unfinished
from lightning_3d.checkpoint.manifest import Entries, write_manifest
from lightning_3d.checkpoint.plain import plain, write_plain
from lightning_3d.checkpoint.planner import SavePlanner
from lightning_3d.checkpoint.randomness import RANDOM_STATES, gather_random_states
from lightning_3d.checkpoint.state import GROUPS, OPTIMIZER, OwnState, State, gather_all, rank, world_size
from lightning_3d.checkpoint.store import Place, at
from lightning_3d.errors import CheckpointWriteError

log = logging.getLogger(__name__)

_HELD_BY_SHARDS = ("state_dict", "optimizer_states")  # Lightning's keys


class Saver:
    """Writes checkpoints, one at a time; every rank has one and calls its methods together.

    Args:
        in_background: ``save`` returns when the weights are copied.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        self.in_background = in_background
        self.newest = ""  # of what it has written, as far as is known: `poll` and `wait` find out
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[str] | None = None
        self._hook: RemovableHandle | None = None  # while it runs
        self._copies = _Copies()

    @property
    def copied_nbytes(self) -> int:
        """Memory that this rank's copies take, for saves in the background."""
        return self._copies.nbytes

    def connect(self) -> None:
        """Make the process group of the background thread; collective."""
        if self.in_background and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._group = dist.new_group(backend="gloo") if world_size() > 1 else None

    def save(
        self, path: str, module: nn.Module, optimizers: Sequence[Optimizer], trainer_state: Mapping[str, Any], layout: str = ""
    ) -> None:
        """Write a checkpoint, or begin to, once the one before is whole.

        Args:
            path: the folder; what is there gives way when this one is whole.
            module: the LightningModule, with its stages built.
            optimizers: its optimizers; none: weights only.
            trainer_state: Lightning's state.
            layout: the ranks that random states are good for.

        Raises:
            CheckpointWriteError: it could not be written; in the background, ``poll``, ``wait`` or ``close`` say so.
        """
        self._wait_or_log()
        own = OwnState(module, optimizers)
        rest = {key: value for key, value in trainer_state.items() if key not in _HELD_BY_SHARDS}
        rest |= {GROUPS: own.gather_groups(), RANDOM_STATES: gather_random_states(layout)}
        job = _Save(at(path), own.by_file_name(), plain(rest), self._group)
        if self._thread is None:
            self.newest = job.run(SavePlanner())
        else:
            planner = self._copies.plan(job.state, self._group, self._thread)
            self._running = self._thread.submit(job.run, planner)
            self._hook = register_optimizer_step_pre_hook(self._before_step)  # of any: one may be inside another

    def poll(self) -> None:
        """Raise the error of a save that has ended in the background.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._running is not None:
            assert self._hook is not None
            wait([self._running])  # and if that is interrupted, it is still running
            self._hook.remove()
            running, self._running = self._running, None
            self.newest = running.result()

    def wait_for_copy(self) -> None:
        """Wait until the optimizers' state may be written to."""
        self._copies.wait()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Wait, but where there is a closure after that: Lightning's is forward and backward."""
        closure = kwargs.get("closure")
        if closure is None:
            self.wait_for_copy()
            return args, kwargs

        def closure_and_wait() -> Any:
            result = closure()
            self.wait_for_copy()
            return result

        return args, kwargs | {"closure": closure_and_wait}

    def close(self, *, after_exception: bool) -> None:
        """Finish what is being written; a failure is only logged where another exception ended the run.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        self._wait_or_log() if after_exception else self.wait()

    def _wait_or_log(self) -> None:
        try:
            self.wait()
        except (CheckpointWriteError, RuntimeError) as error:  # a lost rank is a RuntimeError of the process group
            log.error("%s", error)


class _Copies:
    """A rank's state as it was, in memory that is used again and again: fresh pages cost as much as the copying."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._structure: dict[str, Any] = {}
        self._planner: SavePlanner | None = None  # of the save before
        self._done: Future[State] | None = None  # copies by name

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def wait(self) -> None:
        """Until all is copied, or could not be."""
        if self._done is not None:
            wait([self._done])

    def plan(self, state: State, group: dist.ProcessGroup | None, thread: ThreadPoolExecutor) -> SavePlanner:
        """Copy what this rank will write, or all that it holds where that is not known, for a save that writes it.

        Shapes: none.
        Placement: each rank's own -> in its memory; the optimizers' when the thread is done.
        Communication: all-gather of a bool, world: who writes what depends on what all ranks hold.
        Source: this project.
        """
        tensors = {name: _local(value) for name, value in state.items() if isinstance(value, Tensor)}
        structure = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        same = all(gather_all(structure == self._structure, group))
        written = self._planner.written if self._planner is not None and same else None
        names = tensors.keys() if written is None else tensors.keys() & written
        self._structure = structure
        self._buffers = {name: self._buffer(name, tensors[name]) for name in names}
        copies = self._buffers | {name: deepcopy(value) for name, value in state.items() if name not in tensors}
        later = {name: (state[name], state[name]._version) for name in names if name.startswith(OPTIMIZER)}
        for name in names - later.keys():
            self._buffers[name].copy_(tensors[name])
        stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._done = thread.submit(_copy_later, copies, later, stream)
        self._planner = SavePlanner(self._done)
        return self._planner

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        held = self._buffers.get(name)
        if held is None or (held.shape, held.dtype) != (like.shape, like.dtype):
            held = self._buffers[name] = torch.empty_like(like, device="cpu")
        return held


def _copy_later(copies: State, later: dict[str, tuple[Tensor, int]], stream: torch.cuda.Stream | None) -> State:
    """Fill in the copies of some tensors; beside what the device computes, on a stream of its own."""
    with torch.cuda.stream(stream):
        for name, (tensor, _) in later.items():
            copies[name].copy_(_local(tensor))
    if changed := [name for name, (tensor, version) in later.items() if tensor._version != version]:
        raise RuntimeError(f"{changed[0]} was written to while it was copied: call wait_for_copy() of the strategy's saver before that")
    return copies


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class _Save:
    """One checkpoint on its way to the disk."""

    def __init__(self, folder: Place, state: State, trainer_state: State, group: dist.ProcessGroup | None) -> None:
        self.folder, self.state, self.trainer_state, self.group = folder, state, trainer_state, group
        self.entries: Entries = {}

    def run(self, planner: SavePlanner) -> str:
        """Write it; every rank calls this, and returns its path once it is whole.

        Shapes: none.
        Placement: each rank's shards -> files; copies of other ranks are written once.
        Communication: gather of the plan, world, some KiB a rank; barriers.
        Source: torch.distributed.checkpoint.
        """
        sizes = {name: value.numel() * value.element_size() for name, value in self.state.items() if isinstance(value, Tensor)}
        everyone = gather_all(sizes, self.group)
        self._on_rank_0(lambda: self._begin(sum({name: size for each in everyone for name, size in each.items()}.values())))
        writer = Writer(unfinished(self.folder), rank())
        try:
            dcp.save(self.state, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as error:  # on all ranks
            self._give_up("; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()))
        written = gather_all(writer.entries, self.group)
        self._on_rank_0(lambda: self._finish(written))
        return str(self.folder)

    def _begin(self, nbytes: int) -> None:
        if is_foreign(self.folder):
            raise OSError("something that is no checkpoint stands there")
        if isinstance(self.folder, Path):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if nbytes > shutil.disk_usage(self.folder.parent).free:
                raise OSError(f"it needs {nbytes / 2**30:,.2f} GiB")
        self.entries = {TRAINER_FILE: write_plain(self.trainer_state, begin(self.folder) / TRAINER_FILE)}

    def _finish(self, written: list[Entries]) -> None:
        for each in written:
            self.entries |= each
        write_manifest(unfinished(self.folder), self.entries)
        commit(self.folder)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; if it fails there, fail everywhere."""
        error = None
        if rank() == 0:
            try:
                action()
            except Exception as problem:  # whatever it is, the others wait to hear of it
                error = str(problem) or repr(problem)
        if found := gather_all(error, self.group)[0]:
            self._give_up(found)

    def _give_up(self, reason: str) -> None:
        if rank() == 0:
            abandon(self.folder)
        room = ""
        if isinstance(self.folder, Path) and self.folder.parent.is_dir():
            room = f" ({shutil.disk_usage(self.folder.parent).free / 2**30:,.2f} GiB are free there)"
        raise CheckpointWriteError(f"checkpoint {self.folder} was not written{room}: {reason}")
