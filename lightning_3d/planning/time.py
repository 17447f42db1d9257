"""Operations of a stage, and how long a step takes: not a promise, but the same yardstick for every layout.

A GPU is taken to reach half of its peak, and every collective to take its bytes over its link, while nothing is computed. What is
recomputed takes time and does not count as the model's operations.
"""

from collections.abc import Sequence
from typing import Any

from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.timeline import Action, Timed, makespan, simulate
from lightning_3d.planning.communication import Traffic
from lightning_3d.planning.gpus import Gpu
from lightning_3d.planning.parameters import Part
from lightning_3d.planning.setting import Setting

EFFICIENCY = 0.5  # of the peak, in matrix products and all that is between them
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward takes twice the time of a forward


def flops_per_token(module: Any, setting: Setting, parts: Sequence[Part]) -> int:
    """Model operations of a stage, forward and backward, a token: a Llama's by its formula, else 6 a parameter."""
    llama = getattr(module, "llama", None)
    if llama is None:
        return 6 * sum(part.full_numel for part in parts)
    layers = len({part.unit for part in parts if part.unit})
    is_last = any(part.name == "norm.weight" for part in parts)
    return layers * llama.layer_flops_per_token(setting.sequence_length, causal=False) + is_last * llama.head_flops_per_token


def work_factor(setting: Setting, parts: Sequence[Part]) -> float:
    """Operations that are done by those that count: a block's forward is done again where it is recomputed."""
    recompute = setting.layout.recompute
    again = {"none": 0.0, "selective": 0.1, "full": 1.0}.get(str(recompute), 1 / recompute if isinstance(recompute, int) else 0.0)
    return 1 + again / 3 if any(part.unit for part in parts) else 1.0


def microbatch_s(setting: Setting, gpu: Gpu, flops: float, traffic: Sequence[Traffic]) -> float:
    """Forward and backward of a microbatch on a rank."""
    tokens = setting.micro_batch_size * setting.held_tokens
    within = (
        sum(sent.sent_nbytes / gpu.link_nbytes_per_s(sent.link) for sent in traffic if sent.axis in ("tp", "cp")) / setting.microbatches
    )
    return flops * tokens / setting.layout.dims.tp / (EFFICIENCY * gpu.peak_flops_per_s) + within


def after_schedule_s(gpu: Gpu, traffic: Sequence[Traffic]) -> float:
    """Collectives over dp, once a step."""
    return sum(sent.sent_nbytes / gpu.link_nbytes_per_s(sent.link) for sent in traffic if sent.axis in ("dp", "dp_replicate"))


def bubble(timeline: Sequence[Timed], dims: ParallelDims) -> float:
    """The share of the ranks' time in which they wait."""
    total = makespan(timeline) * dims.pp
    return 1 - sum(timed.end - timed.start for timed in timeline) / total if total else 0.0


def even_timeline(actions: Sequence[Sequence[Action]]) -> list[Timed]:
    """The schedule with stages that all take the same."""
    return simulate(actions, lambda action: UNITS[action.kind])


def timeline(actions: Sequence[Sequence[Action]], stage_s: Sequence[float], transfer_s: float) -> list[Timed]:
    """The schedule with what each stage takes for a microbatch, forward and backward."""
    return simulate(actions, lambda action: stage_s[action.stage] * UNITS[action.kind] / 3, transfer_s)
