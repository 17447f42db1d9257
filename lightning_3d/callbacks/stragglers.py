"""Which rank is slow.

A step takes as long on every rank, since they wait for each other; so what is timed is the forward of each rank's stages, which waits
neither for other replicas nor for other stages. tp and cp peers do wait for each other inside it, and look equally slow.
"""

import logging
from collections import defaultdict
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_3d.callbacks.log_due import log_due
from lightning_3d.callbacks.ranks import gather, rank_name

log = logging.getLogger(__name__)

FROM_BATCH = 1  # the first one connects, compiles and allocates


class Stragglers(Callback):
    """Logs, whenever a log is due, milliseconds a step of forward since the last log, and warns of a rank that is slower than its peers.

    ``forward_ms/min``, ``/median`` and ``/max`` are over the ranks; ``forward_ms/slowest_rank`` is the number of that which is furthest
    above the median of the ranks with the same stages; ``forward_ms/stage_0``, ... are the means of the stages over the ranks that hold
    them: the pipeline is as slow as the slowest. For a module without stages all of ``training_step`` until its loss is timed. On
    CUDA by events (not measured on a GPU).

    Args:
        warn_above: how much slower a rank may be than the median of its peers; 1.3 means by 30 %.
    """

    def __init__(self, warn_above: float = 1.3) -> None:
        self.warn_above = warn_above
        self._handles: list[RemovableHandle] = []
        self._spans: defaultdict[int, list[tuple[Any, Any]]] = defaultdict(list)  # of this rank's stages: begin and end of each forward
        self._begin: dict[int, Any] = {}
        self._counts = False
        self._batches = self._steps = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._spans.clear()
        self._batches = self._steps = 0
        for index, stage in stages_of(pl_module).items():
            self._handles += [
                stage.register_forward_pre_hook(lambda *_, index=index: self._start(index, trainer), prepend=True),
                stage.register_forward_hook(lambda *_, index=index: self._stop(index, trainer)),
            ]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counts = self._batches >= FROM_BATCH
        self._batches += 1
        if not stages_of(pl_module):
            self._start(0, trainer)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Float[Tensor, ""]) -> None:
        if not stages_of(pl_module):
            self._stop(0, trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        self._steps += self._counts
        if log_due(trainer) and self._steps:  # as many on all ranks
            for name, value in self._statistics(trainer).items():
                pl_module.log(f"forward_ms/{name}", value)
            self._spans.clear()
            self._steps = 0
        self._counts = False  # validation runs the stages too

    def _start(self, index: int, trainer: Trainer) -> None:
        if self._counts:
            self._begin[index] = now(trainer.strategy.root_device)

    def _stop(self, index: int, trainer: Trainer) -> None:
        if self._counts and index in self._begin:
            self._spans[index].append((self._begin.pop(index), now(trainer.strategy.root_device)))

    def _statistics(self, trainer: Trainer) -> dict[str, float]:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        stages = getattr(trainer.strategy, "num_stages", 1)
        mine = [sum(milliseconds(*span) for span in self._spans[index]) / self._steps for index in range(stages)]
        by_stage = gather(trainer, mine)
        by_rank = by_stage.sum(dim=1).tolist()
        slowest, ratio = slowest_of(by_rank, [tuple(row) for row in (by_stage > 0).tolist()])
        if ratio > self.warn_above and trainer.is_global_zero:
            log.warning(
                f"{rank_name(trainer, slowest)} is slow: {by_rank[slowest]:.1f} ms a step in forward, "
                f"{ratio:.1f} times the median of its peers"
            )
        sorted_ms = sorted(by_rank)
        overall = {"min": sorted_ms[0], "median": median_low(sorted_ms), "max": sorted_ms[-1], "slowest_rank": float(slowest)}
        held = (by_stage > 0).sum(dim=0).clamp(min=1)
        return overall | {f"stage_{index}": float(total) for index, total in enumerate(by_stage.sum(dim=0) / held)}


def slowest_of(times_ms: list[float], stages: list[tuple[bool, ...]]) -> tuple[int, float]:
    """The rank that takes longest, compared with the median of those that hold the same stages (of all, where each holds others)."""
    peers: defaultdict[tuple[bool, ...], list[float]] = defaultdict(list)
    for time, held in zip(times_ms, stages, strict=True):
        peers[held].append(time)
    alone = max(map(len, peers.values())) == 1
    medians = [median_low(times_ms if alone else peers[held]) for held in stages]
    ratios = [time / max(median, 1e-9) for time, median in zip(times_ms, medians, strict=True)]
    slowest = max(range(len(ratios)), key=ratios.__getitem__)
    return slowest, ratios[slowest]


def stages_of(module: LightningModule) -> dict[int, nn.Module]:
    """The stages of a ``PipelineMixin`` on this rank, by number; none of another module."""
    stages = getattr(module, "stages", None)
    named = stages.named_children() if isinstance(stages, nn.ModuleDict) else ()
    return {int(name): stage for name, stage in named if name.isdigit()}


def now(device: torch.device) -> Any:
    """The time: seconds, or on CUDA an event in the stream, which nobody waits for."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """Between two times."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)
