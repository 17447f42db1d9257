"""``python -m lightning_3d import-config FILE --output RECIPE``: another tool's settings as a recipe that runs."""

from pathlib import Path
from typing import Any

import yaml

from lightning_3d.commands.importing.nanotron import nanotron
from lightning_3d.commands.importing.source import Source, read
from lightning_3d.commands.importing.torchtitan import torchtitan
from lightning_3d.errors import ConfigError


def import_config(file: str, output: str) -> dict[str, Any]:
    """Write a recipe; every key of the file is honoured, listed in the recipe's header, or refused.

    Args:
        file: Nanotron's YAML or TorchTitan's TOML.
        output: the recipe; must not be there yet.

    Raises:
        ConfigError: the file is broken or of another kind, or says what cannot be honoured.
    """
    target = Path(output)
    if target.exists():
        raise ConfigError(f"output: {output} is there already: name another file, or remove it")
    content = read(file)
    source = Source(content, file)
    if {"general", "parallelism", "tokens"} <= content.keys():
        tool, recipe = "Nanotron", nanotron(source)
    elif "training" in content and "model" in content and Path(file).suffix == ".toml":
        tool, recipe = "TorchTitan", torchtitan(source)
    else:
        raise ConfigError(f"{file}: neither a Nanotron YAML (general, parallelism, tokens) nor a TorchTitan TOML (model, training)")
    source.finish()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_header(tool, file, output, source.notes) + yaml.safe_dump(recipe, sort_keys=False, width=140))
    return {"recipe": output, "from": tool, "not carried over": source.notes}


def _header(tool: str, file: str, output: str, notes: list[str]) -> str:
    lines = [
        f"# What:      {Path(file).name}, from {tool}",
        "# Hardware:  as the file was made for; `plan` shows what it needs",
        f"# Command:   python -m lightning_3d fit --config {output}",
        "# Measured:  not yet run",
    ]
    lines += ["# Not carried over, or not quite:", *(f"#   {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"
