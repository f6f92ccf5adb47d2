"""Stores to test, servers behind them, and faults in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import store_kit  # the path comes first
from fault_proxy import FaultProxy, fault_proxy

from shmload.storage import retry


@pytest.fixture(scope="session")
def server() -> store_kit.Server:
    """The S3-compatible server that stands for all."""
    try:
        found = store_kit.s3_server()
    except LookupError as error:
        pytest.skip(str(error))
    found.bucket("tests")
    return found


@pytest.fixture(scope="session")
def proxy(server: store_kit.Server) -> Iterator[FaultProxy]:
    """A proxy before that server; a test gives it its script."""
    with fault_proxy(server.endpoint) as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits between tries; the pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(retry, "_wait", made.append)
    return made
