"""Reading a checkpoint: is it sound, is it this model's, and then each rank's part of it."""

import logging
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from lightning_3d.checkpoint.files import Reader
from lightning_3d.checkpoint.folder import TRAINER_FILE, is_checkpoint, latest_checkpoint, set_damaged_aside
from lightning_3d.checkpoint.manifest import Manifest
from lightning_3d.checkpoint.plain import read_plain
from lightning_3d.checkpoint.state import GROUPS, OwnState, State, gather_all, rank
from lightning_3d.checkpoint.store import at
from lightning_3d.errors import ConfigError, DamagedCheckpointError

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOMENT = re.compile(r"(optimizer\.\d+)\.state\..*\.(\w+)")


def restore(path: str, module: nn.Module, optimizers: Sequence[Optimizer] = (), *, strict: bool = True) -> str:
    """Load model and optimizer state into their own tensors, whatever layout saved them; gives the path.

    Without optimizers, the weights only.

    Args:
        path: folder of the checkpoint.
        module: the LightningModule, with its stages built.
        optimizers: its optimizers, in the order in which they were saved.
        strict: refuse names that only one of checkpoint and model has; otherwise they are passed over.

    Raises:
        DamagedCheckpointError: a file is missing, cut off or altered.
        ConfigError: no checkpoint at ``path``, one of another model or optimizer, or one without optimizer state.
    """
    reader, trainer_state = _together(path, lambda: _open(path))
    held = reader.metadata
    own = OwnState(module, optimizers)
    wanted = own.by_file_name()
    _agree(_difference(wanted, held, strict=strict), path, {name for name in wanted if name.startswith("model.")}, held, strict=strict)
    known = {name: value for name, value in wanted.items() if name in held.state_dict_metadata}
    try:
        _together(path, lambda: reader.fill(known))
    except ConfigError:
        for optimizer in optimizers:
            optimizer.state.clear()  # filled in part; an older checkpoint may lack some of it
        raise
    own.take(known, trainer_state[GROUPS])
    return path


def _open(path: str) -> tuple[Reader, State]:
    """All that is small in a checkpoint."""
    if not is_checkpoint(path):
        raise ConfigError(f"ckpt_path={path} is not a whole sharded checkpoint (a folder with manifest.json): name another")
    reader = Reader(at(path))
    assert reader.metadata is not None  # read now
    return reader, load_trainer_state(path)


def _together(path: str, action: Callable[[], T]) -> T:
    """What an action on this rank gives; raise on all ranks what went wrong on any.

    Shapes: none.
    Placement: each rank's failure -> all of them on all ranks.
    Communication: all-gather of a message, world.
    Source: this project.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    if found := next(filter(None, gather_all(failure and _refusal(path, failure))), None):
        raise found from failure
    return cast(T, result)


def _refusal(path: str, error: Exception) -> Exception:
    if isinstance(error, DamagedCheckpointError):
        return DamagedCheckpointError(f"ckpt_path={path} is damaged: {error}; name an older one, or `last`")
    if isinstance(error, OSError):
        return ConfigError(f"ckpt_path={path} cannot be read ({error}): name another")
    return error if isinstance(error, ConfigError) else RuntimeError(f"{path} was not loaded: {error!r}")


def load_trainer_state(path: str) -> State:
    """Lightning's part of a checkpoint.

    Raises:
        DamagedCheckpointError: it is not what was written.
    """
    return read_plain(BytesIO(Manifest(at(path)).read(TRAINER_FILE)))


def restore_or_older(path: str, module: nn.Module, optimizers: Sequence[Optimizer] = (), *, strict: bool = True) -> str:
    """``restore``, of the newest checkpoint before this one that is sound, where this one is damaged; the path of what was loaded.

    Raises:
        DamagedCheckpointError: no older one is sound.
        ConfigError: as from ``restore``.
    """
    try:
        return restore(path, module, optimizers, strict=strict)
    except DamagedCheckpointError as error:
        older = gather_all(latest_checkpoint(at(path).parent, before=path))[0]  # the view of rank 0
        if older is None:
            raise
        if rank() == 0:
            log.warning("%s. It is kept as %s; the run goes on from %s", error, _set_aside(path), older)
    return restore_or_older(str(older), module, optimizers, strict=strict)


def _set_aside(path: str) -> str:
    try:
        return str(set_damaged_aside(at(path)))
    except OSError:  # a folder that may only be read
        return path


def _difference(wanted: State, held: Metadata, *, strict: bool) -> str | None:
    """Why this rank cannot load what it wants; parameters that were never stepped have no optimizer state and need none."""
    kinds = {match.groups() for name in held.state_dict_metadata if (match := _MOMENT.fullmatch(name))}
    for name, value in wanted.items():
        saved = held.state_dict_metadata.get(name)
        if saved is None and strict and name.startswith("model."):
            return f"is of another model: it does not hold '{name.removeprefix('model.')}'"
        if saved is None and (match := _MOMENT.fullmatch(name)) and match.groups() not in kinds:
            return f"holds no '{match[2]}' of {match[1]}: it was saved with the weights only, or with another optimizer"
        size = getattr(saved, "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            shapes = f"{tuple(size)} there and {tuple(value.shape)} here"
            return f"is of another model: '{name.removeprefix('model.')}' has shape {shapes}"
    return None


def _agree(error: str | None, path: str, names: set[str], held: Metadata, *, strict: bool) -> None:
    """Raise on all ranks what any of them found, or what all of them together leave over of the model.

    Shapes: none.
    Placement: each rank's names -> all names on all ranks.
    Communication: all-gather of the names, world, some KiB a rank.
    Source: this project.
    """
    everyone = gather_all((error, names))
    left = {name for name in held.state_dict_metadata if name.startswith("model.")}.difference(*(names for _, names in everyone))
    over = f"is of another model: it holds '{min(left).removeprefix('model.')}', which this one lacks" if left and strict else None
    found = next((error for error, _ in everyone if error), over)
    if found:
        raise ConfigError(f"ckpt_path={path} {found}")
