"""Makes remote_kit importable from the tests here and the processes they spawn; a real store; folders of datasets go."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # in workers of every start method too
sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))

import store_kit  # the path comes first
from fault_proxy import FaultProxy, fault_proxy

from shmload.storage import retry


@pytest.fixture(scope="session")
def server() -> store_kit.Server:
    """An S3-compatible server."""
    try:
        return store_kit.s3_server()
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def proxy(server: store_kit.Server) -> Iterator[FaultProxy]:
    """A proxy before it; a test gives it its script."""
    with fault_proxy(server.endpoint) as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits between tries; the pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(retry, "_wait", made.append)
    return made


@pytest.fixture(autouse=True)
def private_folders_go(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where datasets make folders of their own; they are gone when the datasets are."""
    place = tmp_path_factory.mktemp("private")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    gc.collect()
    pause, deadline = threading.Event(), monotonic() + 5
    while list(place.iterdir()) and monotonic() < deadline:  # a prefetcher may still be at its last shard
        pause.wait(0.02)
    assert list(place.iterdir()) == []
