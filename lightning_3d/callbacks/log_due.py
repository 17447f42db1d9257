"""When a number is worth computing.

A norm, a device synchronisation or an `.item()` on every step costs throughput for values that nobody sees: Lightning writes
to its loggers every `log_every_n_steps`. This is the same test that it makes after the step, so that what is due here is written.
"""

from lightning.pytorch import Trainer


def log_due(trainer: Trainer) -> bool:
    """Whether Lightning will write to the loggers at the end of the current training step."""
    return bool(trainer._logger_connector.should_update_logs)


def for_the_bar(trainer: Trainer) -> bool:
    """Whether to log with ``prog_bar=True``, which has Lightning read a value after every step; our bar reads it when it shows it."""
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "reads_when_due", False)
