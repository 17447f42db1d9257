"""Parameter groups with and without weight decay.

A pattern is a regular expression that must match a parameter's *whole* global name (`re.fullmatch`): `norm` excludes nothing and
`.*norm.*` every norm, so a pattern never takes more than it spells. What matched is logged.

A rank's groups depend on its stage: `.*embed_tokens.weight` matches nothing on a middle one. An empty group is left out, since torch's
own flattened optimizer state (2.13) cannot be loaded into an optimizer that has one. Checkpoints are keyed by parameter name
and our scheduler's state holds no groups, so stages may differ.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lightning_3d.errors import ConfigError

log = logging.getLogger(__name__)


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    exclude: Sequence[str] = (),
    all_names: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Group this rank's trainable parameters for an optimizer: those with weight decay, then those without; empty ones left out.

    Args:
        named_parameters: this rank's parameters under their global names.
        weight_decay: AdamW's coefficient for the parameters that no pattern matches.
        exclude: patterns; each must match a whole name.
        all_names: the names of the whole model's parameters, which the patterns are checked against; by default this rank's.

    Raises:
        ConfigError: a pattern is no regular expression, or matches no parameter of the model.
    """
    parameters = [pair for pair in named_parameters if pair[1].requires_grad]  # two of one name where both ends of a pipeline are here
    excluded = excluded_names(dict(parameters) if all_names is None else all_names, exclude)
    decayed = [parameter for name, parameter in parameters if name not in excluded]
    undecayed = [parameter for name, parameter in parameters if name in excluded]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def excluded_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that some pattern matches as a whole, logged at INFO pattern by pattern.

    Raises:
        ConfigError: a pattern is no regular expression, or matches none of the names.
    """
    names, excluded = list(names), set[str]()
    for pattern in patterns:
        matched = [name for name in names if _compiled(pattern).fullmatch(name)]
        if not matched:
            raise ConfigError(
                f"weight_decay_exclude_named_params: {pattern!r} matches the whole name of no parameter, such as {names[:1]}; "
                f"'.*{pattern}.*' would match {sum(bool(re.search(pattern, name)) for name in names)} of {len(names)}."
            )
        log.info("No weight decay by %r: %d parameters: %s", pattern, len(matched), ", ".join(matched))
        excluded.update(matched)
    return excluded


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"weight_decay_exclude_named_params: {pattern!r} is not a regular expression: {error}.") from None
