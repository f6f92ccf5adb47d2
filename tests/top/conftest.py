"""Makes the kits and the program beside the tests importable; a fixture with an idle loader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.top.live_kit import running


@pytest.fixture(scope="module")
def still() -> Iterator[int]:
    """Yields the process id of a trainer that does nothing: it holds two batches, and four are ready."""
    with running("still") as program:
        yield program.pid
