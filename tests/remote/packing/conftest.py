"""Makes packing_kit and the kits of stores importable, also for workers of every start method."""

from __future__ import annotations

import pytest

from tests.storage import store_kit


@pytest.fixture(scope="session")
def server() -> store_kit.Server:
    """Returns an S3-compatible server, or skips the test."""
    try:
        return store_kit.s3_server()
    except LookupError as error:
        pytest.skip(str(error))
