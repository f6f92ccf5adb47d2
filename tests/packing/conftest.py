"""Puts packing_kit on the path, for workers of every start method too, and what starts servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))

import store_kit  # the path comes first


@pytest.fixture(scope="session")
def server() -> store_kit.Server:
    """An S3-compatible server."""
    try:
        return store_kit.s3_server()
    except LookupError as error:
        pytest.skip(str(error))
