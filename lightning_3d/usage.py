"""What jsonargparse has against a command line or a YAML file, as one line.

Its parser prints up to 80 lines of usage first, and for a value that may be of several types it lists what each type has against it,
most of which is beside the point: a misspelt key of a model is also "not a subclass of" the other kinds of model.
"""

import re
from typing import Any, NoReturn

from lightning_3d.errors import ConfigError

_REASON = re.compile(r"not accept|unrecognized|required|No such|not (find|found)|Unable to|[Ii]nvalid|Expected an? <class '(?!NoneType)")


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
    key = next((match[1] for line in lines if (match := re.search(r'[Kk]ey "([^"]+)"', line))), "")
    reasons = list(dict.fromkeys(line for line in lines if _REASON.search(line))) or lines
    return (f"{key}: " if key else "") + "; ".join(reasons)
