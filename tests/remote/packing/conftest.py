"""Puts packing_kit on the path, for workers of every start method too, and what starts servers."""

from __future__ import annotations

import pytest

from tests.storage import store_kit


@pytest.fixture(scope="session")
def server() -> store_kit.Server:
    """An S3-compatible server."""
    try:
        return store_kit.s3_server()
    except LookupError as error:
        pytest.skip(str(error))
