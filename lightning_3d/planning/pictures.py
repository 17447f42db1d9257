"""An estimate, drawn: the schedule, memory through a step, and the mesh; each as SVG and PNG.

Colours are Okabe and Ito's, which people with any kind of colour blindness tell apart; forward and backward differ in lightness, too.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planning.estimate import Estimate, Stage
from lightning_3d.planning.gpus import GIB
from lightning_3d.planning.report import KINDS, layout

COLOURS = {"F": "#56B4E9", "B": "#E69F00", "I": "#F0E442", "W": "#009E73"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
KIND_COLOURS = ("#0072B2", "#56B4E9", "#9AD0F5", "#E69F00", "#F5C76A", "#009E73", "#CC79A7", "#D55E00", "#999999")
STAGE_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#999999")
IDLE = "#E8E8E8"
MAX_RANKS = 64
MAX_NUMBERED = 400  # actions; more would not be legible


def draw(estimate: Estimate, folder: str) -> list[str]:
    """Write the pictures; returns their paths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("out: pictures need matplotlib: pip install 'lightning-3d[plan]'") from None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in (("schedule", _schedule), ("memory", _memory), ("mesh", _mesh)):
        figure = Figure(layout="constrained")
        picture(figure, estimate)
        for kind in ("svg", "png"):
            path = target / f"{name}.{kind}"
            figure.savefig(path, dpi=150)
            written.append(str(path))
    return written


def _title(axes: Any, what: str, estimate: Estimate) -> None:
    axes.set_title(f"{what}\n{layout(estimate)}", fontsize=10, loc="left")


def _schedule(figure: Any, estimate: Estimate) -> None:
    """A row a coord of the pipeline, a cell a microbatch."""
    from matplotlib.patches import Patch

    coords, end_s = len(estimate.stages), estimate.schedule_s
    figure.set_size_inches(11, 1.8 + 0.55 * coords)
    axes = figure.subplots()
    numbered = len(estimate.timeline) <= MAX_NUMBERED
    virtual = estimate.setting.virtual_stages > 1
    for coord in range(coords):
        axes.barh(coord, end_s, height=0.8, color=IDLE)
    for rank, action, start, end in estimate.timeline:
        later = virtual and action.stage >= coords  # a rank's second stage and further ones are hatched
        axes.barh(
            rank, end - start, 0.8, start, color=COLOURS[action.kind], edgecolor="white", linewidth=0.6, hatch="//" if later else None
        )
        if numbered and (end - start) / end_s > 0.008:
            axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=8)
    kinds = [kind for kind in COLOURS if any(timed.action.kind == kind for timed in estimate.timeline)]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds] + [Patch(color=IDLE, label=f"idle {estimate.idle:.0%}")]
    handles += [Patch(facecolor="white", edgecolor="black", hatch="//", label="a further stage of the rank")] if virtual else []
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    axes.set_yticks(range(coords), [f"stage {stage.coord}\n{_short(stage)}" for stage in estimate.stages], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, end_s), xlabel="seconds (estimated)")
    axes.spines[["top", "right"]].set_visible(False)
    _title(axes, "Who computes which microbatch when", estimate)


def _short(stage: Stage) -> str:
    layers = [word for word in stage.contents.split() if word[0].isdigit()]
    return f"layers {' + '.join(layers)}" if len(layers) < 4 else f"layers {layers[0]} + ... + {layers[-1]}"


def _memory(figure: Any, estimate: Estimate) -> None:
    """An area a kind, a panel a coord of the pipeline (the first, the worst and the last where there are many)."""
    shown = _some(estimate)
    figure.set_size_inches(11, 1.2 + 2.4 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    used = [kind for kind in KINDS if any(getattr(moment.memory, kind) for stage in shown for moment in stage.moments)]
    top = max(stage.peak.total for stage in shown)
    scale, unit = next(((1024**power, name) for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")) if top >= 1024**power), (1, "B"))
    for axes, stage in zip(panels, shown, strict=True):
        times, memories = _through_step(estimate, stage)
        rows = [[getattr(memory, kind) / scale for memory in memories] for kind in used]
        colours = [KIND_COLOURS[KINDS.index(kind)] for kind in used]
        axes.stackplot(times, rows, labels=used, colors=colours, step="post", linewidth=0)
        usable = estimate.gpu.usable_nbytes
        if usable < 3 * top:
            axes.axhline(usable / scale, color="black", linestyle="--", linewidth=1)
            axes.text(times[-1], usable / scale, f"usable {usable / GIB:.0f} GiB ", ha="right", va="bottom", fontsize=8)
        limit = max(top, usable) if usable < 3 * top else top
        axes.set(ylabel=f"stage {stage.coord}: {unit}", xlim=(0, times[-1]), ylim=(0, 1.15 * limit / scale))
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds of a step (estimated); at the end gradients are reduced and weights updated")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(used), frameon=False, fontsize=9)
    _title(panels[0], "What a rank holds through a step", estimate)


def _some(estimate: Estimate) -> Sequence[Stage]:
    if len(estimate.stages) <= 4:
        return estimate.stages
    coords = sorted({0, estimate.worst.coord, len(estimate.stages) // 2, len(estimate.stages) - 1})
    return [estimate.stages[coord] for coord in coords]


def _through_step(estimate: Estimate, stage: Stage) -> tuple[list[float], list[Any]]:
    """Times and memories; a moment lasts until the next begins."""
    timed = {each.action: each for each in estimate.timeline if each.rank == stage.coord}
    rest, *within, reduction = stage.moments
    times, memories = [0.0], [rest.memory]
    for action, group in groupby(within, lambda moment: moment.action):
        assert action is not None
        span, found = timed[action], [moment.memory for moment in group]
        step = (span.end - span.start) / max(1, len(found) - 1)  # the last moment is at the end
        times += [span.start + place * step for place in range(len(found))]
        memories += found
    tail = max(estimate.after_schedule_s, 0.03 * estimate.schedule_s)
    times += [estimate.schedule_s, estimate.schedule_s + tail]
    memories += [reduction.memory, rest.memory]
    return times, memories


def _mesh(figure: Any, estimate: Estimate) -> None:
    """A cell a rank, a row a node."""
    dims, per_node = estimate.setting.layout.dims, estimate.setting.gpus_per_node
    ranks = min(dims.world_size, MAX_RANKS)
    columns = min(per_node, ranks)
    rows = -(-ranks // columns)
    figure.set_size_inches(1.5 + 1.25 * columns, 1.3 + 0.75 * rows)
    axes = figure.subplots()
    for rank in range(ranks):
        coord = dims.coord(rank)
        x, y = rank % columns, rank // columns
        axes.add_patch(_cell(x, y, STAGE_COLOURS[coord.pp % len(STAGE_COLOURS)]))
        names = {"pp": coord.pp, "dp": coord.dp, "cp": coord.cp, "tp": coord.tp}
        sizes = {"pp": dims.pp, "dp": dims.dp, "cp": dims.cp, "tp": dims.tp}
        text = "  ".join(f"{axis}{names[axis]}" for axis in names if sizes[axis] > 1)
        axes.text(x + 0.5, y + 0.38, f"rank {rank}", ha="center", va="center", fontsize=9, fontweight="bold")
        axes.text(x + 0.5, y + 0.68, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[row + 0.5 for row in range(rows)])
    axes.set_yticklabels([f"node {row}" for row in range(rows)], fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    more = f" (the first {ranks} of {dims.world_size:,})" if ranks < dims.world_size else ""
    _title(axes, f"Which rank is where{more}: a colour a stage of the pipeline", estimate)


def _cell(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=colour, edgecolor="white")
