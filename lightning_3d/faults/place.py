"""Where a rank is in its work: stage, microbatch, layer, collective, line.

Nothing is recorded for it while training runs. The stack has it all, that of an exception as well as that of a thread that waits: the
modules whose ``forward`` is being called, and the number of the microbatch in the frame of the schedule, torch's or ours. A backward
calls no module, except where blocks are computed again; there stage and microbatch are known, and the line.
"""

import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import lightning
import torch
from torch import nn

_TORCH, _LIGHTNING = (os.path.join(*package.__path__, "") for package in (torch, lightning))
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_OPERATORS = os.path.join("torch", "_ops.py")  # what functional collectives call at last
_SCHEDULES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "parallel", "")


@dataclass
class Place:
    """What a stack says; what it does not say is None or empty."""

    stage: int | None = None
    microbatch: int | None = None
    layer: str = ""
    backward: bool = False
    collective: str = ""  # the function of torch.distributed that has not returned
    line: str = ""  # the innermost that is neither torch's nor Lightning's

    @property
    def work(self) -> str:
        """Stage, microbatch and layer, as far as they are known."""
        phase = "backward" if self.backward else "forward"
        stage = f"{phase} of stage {self.stage}" if self.stage is not None else ""
        microbatch = f"microbatch {self.microbatch}" if self.microbatch is not None else ""
        return ", ".join(part for part in (stage, microbatch, self.layer) if part)

    def __str__(self) -> str:
        collective = f"waits in {self.collective}" if self.collective else ""
        return ", ".join(part for part in (collective, self.work) if part) + f" at {self.line}"


def place_of_error(error: BaseException, module: nn.Module) -> Place:
    """Where an exception was raised, the first of those that led to it."""
    frames = [pair for each in reversed(chain(error)) for pair in traceback.walk_tb(each.__traceback__)]
    return _read(frames, module)


def place_of_thread(thread: int, module: nn.Module) -> Place:
    """Where a thread of this process is now."""
    frame = sys._current_frames().get(thread)
    return _read(reversed(list(traceback.walk_stack(frame))), module) if frame else Place()


def chain(error: BaseException) -> list[BaseException]:
    """The exception that began it, then those that it led to."""
    errors = [error]
    while (cause := errors[0].__cause__ or (None if errors[0].__suppress_context__ else errors[0].__context__)) is not None:
        errors.insert(0, cause)
    return errors


def is_library(file: str) -> bool:
    """Whether it is torch's or Lightning's, where a person would not look first."""
    return file.startswith((_TORCH, _LIGHTNING))


def _read(frames: Iterable[tuple[FrameType, int]], module: nn.Module) -> Place:
    """From the outermost frame to the innermost."""
    names = {id(each): name for name, each in module.named_modules()}
    place = Place()
    for frame, number in frames:
        file, function, values = frame.f_code.co_filename, frame.f_code.co_name, frame.f_locals
        owner = values.get("self")
        _note_microbatch(place, file, function, values)
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            _note_layer(place, names[id(owner)])
        if file.startswith(_DISTRIBUTED):
            place.collective = function if function != "wrapper" else place.collective
        elif not file.endswith(_OPERATORS):
            place.collective = ""
        if not is_library(file) or not place.line:
            source = linecache.getline(file, number).strip()
            place.line = f"{file}:{number} in {function}: {source}"
            place.collective = ".wait()" if ".wait(" in source else place.collective
    return place


def _note_microbatch(place: Place, file: str, function: str, values: Mapping[str, Any]) -> None:
    if function.endswith("_one_chunk"):  # torch's stages
        place.stage, place.backward = getattr(values.get("self"), "stage_index", None), function.startswith("backward")
        place.microbatch = next((values[name] for name in ("fwd_chunk_id", "bwd_chunk_id") if name in values), None)
    elif file.startswith(_SCHEDULES) and isinstance(values.get("number"), int):
        place.microbatch = values["number"]
        place.stage = values["index"] if isinstance(values.get("index"), int) else place.stage
    elif function == "_engine_run_backward":
        place.backward = True


def _note_layer(place: Place, name: str) -> None:
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    if len(parts) > 1 and parts[0] == "stages" and parts[1].isdigit():
        place.stage = int(parts[1])
        parts = parts[2:]
    place.layer = ".".join(parts) if parts != ["stages"] else ""
