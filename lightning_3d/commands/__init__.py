"""Commands that read or write recipes and start nothing: plan, init, import-config."""
