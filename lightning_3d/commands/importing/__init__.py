"""Recipes from other tools' files: Nanotron's YAML, TorchTitan's TOML."""
