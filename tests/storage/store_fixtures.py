"""Fixtures for tests with a store, used here and in tests/remote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shmload.storage import retry
from shmload.storage.open_store import open_store
from shmload.storage.store import Store
from shmload.storage.transport import Transport
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.store_kit import Server, s3_server

__all__ = ["growing_patience", "open_new_folder", "pauses", "proxy", "server"]


def open_new_folder(scheme: str, through: Callable[[str], str] = str) -> Store:
    """Returns a new folder in a store that fsspec reaches; skips the test if its server is not installed."""
    try:
        return open_store(*store_kit.new_folder_url(scheme, through))
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server() -> Server:
    """Returns the default S3-compatible server, with a bucket `tests`."""
    try:
        found = s3_server()
    except LookupError as error:
        pytest.skip(str(error))
    found.bucket("tests")
    return found


@pytest.fixture(scope="session")
def proxy(server: Server) -> Iterator[FaultProxy]:
    """Yields a proxy in front of the server; a test sets its script."""
    with fault_proxy(server.endpoint) as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes retries not wait; returns the list of the skipped pauses."""
    made: list[float] = []
    monkeypatch.setattr(retry, "_wait", made.append)
    return made


@pytest.fixture
def growing_patience(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> list[float]:
    """Makes tries fail after 0.05 s without an answer, and later ones after a longer time; returns the list of the skipped pauses.

    So the first stalls take a short time, and a busy machine, on which every answer takes longer than that, is no outage.
    """

    def set_stall(transport: Transport, stall_s: float) -> None:
        transport.__dict__["stall_s"] = stall_s  # of a prefetcher that reads on after the test

    monkeypatch.setattr(Transport, "stall_s", property(lambda _: 0.05 * 1.3 ** min(len(pauses), 30), set_stall), raising=False)
    return pauses
