"""The path to the kit and the program beside the tests, and to the fault tests' kit; a loader that stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.top.live_kit import running


@pytest.fixture(scope="module")
def still() -> Iterator[int]:
    """The pid of a trainer that stands still: it holds two batches, and four are ready."""
    with running("still") as program:
        yield program.pid
