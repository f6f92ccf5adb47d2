"""Fixtures of the tests that have a store: here and in tests/remote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmload.storage import transport
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.store_kit import Server, s3_server

__all__ = ["pauses", "proxy", "server"]


@pytest.fixture(scope="session")
def server() -> Server:
    """The S3-compatible server that stands for all, with a bucket `tests`."""
    try:
        found = s3_server()
    except LookupError as error:
        pytest.skip(str(error))
    found.bucket("tests")
    return found


@pytest.fixture(scope="session")
def proxy(server: Server) -> Iterator[FaultProxy]:
    """A proxy before that server; a test gives it its script."""
    with fault_proxy(server.endpoint) as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits between tries; the pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(transport, "_wait", made.append)
    return made
