"""Exceptions with a meaning of their own."""


class ConfigError(ValueError):
    """The user's to mend: one clear line that names the key, the values and the fix; the command line prints it without a traceback."""


class DamagedCheckpointError(ConfigError):
    """A checkpoint whose files are not what was written."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; older ones are as they were, and training may go on."""
