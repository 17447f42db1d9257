"""Whether a run fits, by how much it does not, and what to change first: found by trying."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planning.estimate import Costs, Estimate, estimate
from lightning_3d.planning.gpus import GIB
from lightning_3d.planning.setting import Setting


def verdict(module: Any, made: Estimate, known: Costs | None = None) -> str:
    """One line or two: fits or not, and the change that helps most."""
    peak, usable = made.worst.peak, made.gpu.usable_nbytes
    sizes = f"{peak.total / GIB:.1f} GiB on stage {made.worst.coord}, usable are {usable / GIB:.1f} of {made.gpu.memory_nbytes / GIB:.0f}"
    if made.fits:
        return f"verdict     fits: {sizes}"
    largest = max(peak.by_kind(), key=lambda kind: peak.by_kind()[kind])
    over = f"verdict     does not fit: {sizes}; {(peak.total - usable) / GIB:.1f} GiB too many, most of them {largest}"
    tried = []
    for change, setting in changes(module, made.setting):
        try:
            other = estimate(module, setting, made.gpu, known)
        except ConfigError:
            continue
        tried.append((change, other))
    fitting = [(change, other) for change, other in tried if other.fits]
    if fitting:
        change, best = min(fitting, key=lambda pair: pair[1].step_s)
        return f"{over}\nchange      {change}: {best.worst.peak.total / GIB:.1f} GiB, it fits"
    if not tried:
        return f"{over}\nchange      nothing alone helps: --search proposes layouts"
    change, best = min(tried, key=lambda pair: pair[1].worst.peak.total)
    return f"{over}\nchange      first {change}: {best.worst.peak.total / GIB:.1f} GiB; then more, or see --search"


def changes(module: Any, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Single changes that may save memory, each as a recipe says it."""
    layout, dims = setting.layout, setting.layout.dims
    if dims.tp > 1 and not layout.sequence_parallel and setting.sequence_length % dims.tp == 0:
        yield "sequence_parallel: true", replace(setting, layout=replace(layout, sequence_parallel=True))
    if dims.dp > 1 and layout.data_parallel == "ddp":
        yield "data_parallel: fsdp", replace(setting, layout=replace(layout, data_parallel="fsdp"))
    modes = ["none", "selective", "full"]
    for mode in modes[modes.index(str(layout.recompute)) + 1 :] if layout.recompute in modes else ["full"]:
        yield f"recompute: {mode}", replace(setting, layout=replace(layout, recompute=mode))  # type: ignore[arg-type]
    if setting.micro_batch_size % 2 == 0:
        half, twice = setting.micro_batch_size // 2, setting.microbatches * 2
        sizes = f"micro_batch_size: {half} and batch_accumulation_per_replica: {twice}"
        yield sizes, replace(setting, micro_batch_size=half, microbatches=twice)
    if dims.dp % 2 == 0 and dims.replicate == 1:
        twice = setting.microbatches * 2  # the same global batch on half as many replicas
        if dims.tp * 2 <= setting.gpus_per_node:
            wider = replace(dims, dp=dims.dp // 2, tp=dims.tp * 2)
            yield f"tp: {wider.tp}, dp: {wider.dp}", setting.at(wider, microbatches=twice)
        longer = replace(dims, dp=dims.dp // 2, pp=dims.pp * 2)
        yield f"pp: {longer.pp}, dp: {longer.dp}", setting.at(longer, microbatches=twice)
