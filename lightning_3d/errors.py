"""The one exception that is the user's to mend: a setting, a file or a batch that cannot work."""


class ConfigError(ValueError):
    """One clear line that names the key, the values and the fix; the command line prints it without a traceback."""
