"""Checks jaxtyping's shapes with beartype while tests run, and makes hypothesis repeatable."""

from hypothesis import settings
from jaxtyping import install_import_hook

# Before the first import of the package: the hook acts at import.
install_import_hook("lightning_3d", "typecheck.check")

# The same examples every time, and no deadline: 2 cores shared by 8 processes have slow moments.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")
