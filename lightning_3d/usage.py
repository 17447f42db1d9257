"""What jsonargparse has against a command line or a YAML file, as one line.

Its parser prints up to 80 lines of usage first, and for a value that may be of several types it lists what each type has against it,
most of which is beside the point: a misspelt key of a model is also "not a subclass of" the other kinds of model.
"""

import re
from typing import Any, NoReturn

from lightning_3d.errors import ConfigError

# Lines that say only where a reason stands, or that a value is not of one of the other types that it might have been.
_FRAME = re.compile(
    r"Parser key|Does not validate|Subtypes:|Errors:|Given value|Problem with given class_path|Import path|Not a valid subclass"
    r"|Subclass types expect|a class path|a dict with|Expected an? <class '(NoneType|str)'>$"
)


class OneLineErrors:
    """Mix into a jsonargparse parser, first."""

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Called by the parser.

        Raises:
            ConfigError: always, with the message on one line.
        """
        raise ConfigError(one_line(message))


def one_line(message: str) -> str:
    """The key and the innermost reasons."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    key = next((match[1] for line in lines if (match := re.match(r'Parser key "([^"]+)"', line))), "")
    reasons = list(dict.fromkeys(line for line in lines if not _FRAME.match(line))) or lines
    text = "; ".join(reasons).replace("Expected a dot import path string:", "no class is known by this name, give its full path:")
    given = next((match[1] for line in reversed(lines) if (match := re.match(r"Given value: (.*)", line))), "")
    is_news = len(given) < 80 and given not in text and "(given:" not in text
    return (f"{key}: " if key else "") + text + (f" (given: {given})" if is_news else "")
