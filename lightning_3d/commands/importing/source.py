"""A foreign file whose keys are taken one by one, so that none is dropped unseen: what is left over at the end is refused."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.errors import ConfigError

tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_ABSENT = object()


class Source:
    """Nested keys, what has become of them, and what cannot be had here.

    Args:
        content: of the file.
        path: its name, for messages.
    """

    def __init__(self, content: Mapping[str, Any], path: str) -> None:
        self.path = path
        self._left = _flat(content)
        self.notes: list[str] = []
        self._problems: list[str] = []

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of the keys (dotted) that the file has; the others count as seen too. A null counts as absent."""
        found = default
        for key in reversed(keys):
            value = self._pop(key)
            found = found if value is _ABSENT or value is None else value
        return found

    def has(self, key: str) -> bool:
        """Whether a key, or one below it, is there and not yet taken."""
        return key in self._left or any(name.startswith(f"{key}.") for name in self._left)

    def only(self, key: str, *allowed: Any, because: str) -> None:
        """Take a key that can have these values alone; null is always one of them."""
        value = self.take(key)
        if value is not None and value not in allowed:
            self.refuse(f"{key}: {value!r}: {because}")

    def leave_out(self, keys: Mapping[str, str]) -> None:
        """Take keys that have no counterpart; those whose value is neither null, false nor empty are listed with the reason."""
        for key, reason in keys.items():
            for name in [name for name in self._left if name == key or name.startswith(f"{key}.")]:
                value = self._pop(name)
                if value not in (None, False, [], {}, ""):
                    self.note(f"{name}: {value!r}: {reason}")

    def note(self, text: str) -> None:
        """Something that the reader must know."""
        self.notes.append(text)

    def refuse(self, text: str) -> None:
        """Something that cannot be honoured."""
        self._problems.append(text)

    def absorb(self, part: "Source") -> None:
        """Take over what has become of a part of the file, whose ``path`` is its key."""
        self.notes += [f"{part.path}.{note}" for note in part.notes]
        self._problems += [f"{part.path}.{problem}" for problem in part._problems]
        self._problems += [f"{part.path}.{key}: not known" for key in part._left]

    def finish(self) -> None:
        """Raise what was refused, and keys that nobody took.

        Raises:
            ConfigError: there is some of either.
        """
        unknown = [f"{key}: not known" for key in self._left]
        if problems := self._problems + unknown:
            raise ConfigError(f"{self.path} cannot be imported: " + "; ".join(problems))

    def _pop(self, key: str) -> Any:
        if key in self._left:
            return self._left.pop(key)
        below = {name: self._left.pop(name) for name in [*self._left] if name.startswith(f"{key}.")}
        return _nested({name.removeprefix(f"{key}."): value for name, value in below.items()}) if below else _ABSENT


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; keys that have dots or slashes themselves (paths) stay within their mapping."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value and all(isinstance(name, str) and "." not in name and "/" not in name for name in value):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return nested


def read(path: str) -> dict[str, Any]:
    """The content of a YAML or TOML file.

    Raises:
        ConfigError: it is not there, is neither, or is broken; with the line.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        content = tomllib.loads(file.read_text()) if file.suffix == ".toml" else yaml.safe_load(file.read_text())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}: line {line}: {error.problem}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None  # TOML's message ends with the line
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: there are no keys in it: give a Nanotron YAML or a TorchTitan TOML file")
    return content
