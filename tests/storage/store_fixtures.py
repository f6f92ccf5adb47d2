"""Fixtures of the tests that have a store: here and in tests/remote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shmload.storage import retry
from shmload.storage.open_store import open_store
from shmload.storage.store import Store
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.store_kit import Server, s3_server

__all__ = ["elsewhere", "pauses", "proxy", "server"]


def elsewhere(scheme: str, through: Callable[[str], str] = str) -> Store:
    """A new folder in a store that fsspec reaches; the test is skipped where its server is not installed."""
    try:
        return open_store(*store_kit.elsewhere(scheme, through))
    except LookupError as error:
        pytest.skip(str(error))


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
    monkeypatch.setattr(retry, "_wait", made.append)
    return made
