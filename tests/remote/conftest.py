"""Makes remote_kit importable from the tests here and the processes they spawn; a real store; folders of datasets go."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.storage.store_fixtures import pauses, proxy, server

__all__ = ["pauses", "private_folders_go", "proxy", "server"]


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
        gc.collect()  # what has failed and was tried again may have left its traceback
    assert list(place.iterdir()) == []
