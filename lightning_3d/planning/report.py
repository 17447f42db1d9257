"""An estimate as text."""

from collections.abc import Iterable, Sequence

from lightning_3d.planning.estimate import Estimate
from lightning_3d.planning.gpus import GIB

KINDS = ("weights", "gathered", "casts", "gradients", "reduction", "optimizer", "activations", "logits", "receive")


def report(estimate: Estimate) -> str:
    """All of it but the verdict."""
    setting, dims = estimate.setting, estimate.setting.layout.dims
    head = [
        f"layout      {layout(estimate)}",
        f"hardware    {dims.world_size:,} x {estimate.gpu.name}, {setting.gpus_per_node} a node",
        f"model       {estimate.numel:,} parameters, {estimate.flops_per_token / 1e9:,.2f} GFLOP a token",
        f"step        {setting.global_batch_tokens:,} tokens: {setting.microbatches} microbatches of {setting.micro_batch_size} x "
        f"{setting.sequence_length:,} on each of {dims.dp} replicas; {setting.precision}",
    ]
    sections = [head, _stages(estimate), _memory(estimate), _communication(estimate), _time(estimate)]
    notes = uneven(estimate)
    return "\n\n".join("\n".join(section) for section in [*sections, *([notes] if notes else [])])


def layout(estimate: Estimate) -> str:
    """One line: the sizes of the axes, and how each is used."""
    plan = estimate.setting.layout
    dims = plan.dims
    words = [dims.describe(), plan.data_parallel]
    words += [f"cp_method={plan.cp_method}"] if dims.cp > 1 else []
    words += [f"dp_replicate={dims.replicate}"] if dims.replicate > 1 else []
    words += ["sequence_parallel"] if plan.sequence_parallel else []
    words += [estimate.setting.engine] if dims.pp > 1 else []
    words += [f"virtual_stages={estimate.setting.virtual_stages}"] if estimate.setting.virtual_stages > 1 else []
    words += [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    return ", ".join(words)


def table(rows: Iterable[Sequence[str]], *, left: int) -> list[str]:
    """Rows of aligned cells; the first ``left`` columns begin at the left."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _stages(estimate: Estimate) -> list[str]:
    rows = [("stage", "layers", "parameters", "a rank", "GFLOP/token")]
    rows += [
        (str(stage.coord), stage.contents, f"{stage.full_numel:,}", f"{stage.local_numel:,}", f"{stage.flops_per_token / 1e9:,.2f}")
        for stage in estimate.stages
    ]
    return table(rows, left=2)


def _memory(estimate: Estimate) -> list[str]:
    kinds = [kind for kind in KINDS if any(stage.peak.by_kind().get(kind) for stage in estimate.stages)]
    rows = [("stage", *kinds, "peak", f"of {estimate.gpu.memory_nbytes / GIB:.0f} GiB")]
    for stage in estimate.stages:
        sizes = [size(getattr(stage.peak, kind)) for kind in (*kinds, "total")]
        rows.append((str(stage.coord), *sizes, f"{stage.peak.total / estimate.gpu.memory_nbytes:.0%}"))
    return ["memory of a rank at its worst moment", *table(rows, left=1)]


def size(nbytes: float) -> str:
    """Bytes with their unit."""
    power = next((power for power in (4, 3, 2, 1) if nbytes >= 1000 * 1024 ** (power - 1)), 0)
    return f"{nbytes / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}" if power < 4 else f"{nbytes / 1024**4:,.1f} TiB"


def _communication(estimate: Estimate) -> list[str]:
    busiest = max(estimate.stages, key=lambda stage: sum(sent.sent_nbytes for sent in stage.traffic))
    rows = [("what", "axis", "ranks", "nodes", "collective", "a step", "sent")]
    rows += [
        (sent.what, sent.axis, f"{sent.ranks:,}", sent.link, sent.kind, f"{sent.count:,}", size(sent.sent_nbytes))
        for sent in busiest.traffic
    ]
    return [f"communication of a rank of stage {busiest.coord} in a step", *(table(rows, left=5) if busiest.traffic else ["none"])]


def _time(estimate: Estimate) -> list[str]:
    dims = estimate.setting.layout.dims
    lines = (
        [f"bubble      {estimate.bubble:.1%} by the schedule, {estimate.idle:.1%} with stages as uneven as these"] if dims.pp > 1 else []
    )
    per_s = estimate.setting.global_batch_tokens / estimate.step_s
    return [
        *lines,
        f"step        about {estimate.step_s:.2f} s at half of the peak, with communication beside it: {per_s:,.0f} tokens/s, "
        f"mfu {estimate.mfu:.0%}",
    ]


def uneven(estimate: Estimate) -> list[str]:
    """What is cut into parts that are not equal."""
    layout, notes = estimate.setting.layout, []
    parts = {part.name: part for stage in estimate.stages for one in stage.parts.values() for part in one}
    dims = layout.dims
    cuts = {
        next(size for size, kept in zip(part.shape, part.cut, strict=True) if size != kept): part.name
        for part in parts.values()
        if part.shape != part.cut
    }
    notes += [
        f"{size} of {name} is not divisible by tp={dims.tp}: the last ranks hold less" for size, name in cuts.items() if size % dims.tp
    ]
    layers = [len({part.unit for part in one if part.unit}) for stage in estimate.stages for one in stage.parts.values()]
    if len(set(layers)) > 1:
        notes.append(f"layers of the stages: {layers}; they are split by what they cost, or by model.stage_layers")
    return [f"uneven      {note}" for note in notes]
