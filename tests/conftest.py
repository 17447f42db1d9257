"""Checks jaxtyping's shapes with beartype while tests run, and makes hypothesis repeatable."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Before the first import of the package: the hook acts at import.
install_import_hook("lightning_3d", "typecheck.check")

from lightning_3d.testing import RankPool  # noqa: E402

# The same examples every time, and no deadline: 2 cores shared by 8 processes have slow moments.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Processes that live as long as the tests do."""
    with RankPool() as ranks:
        yield ranks
