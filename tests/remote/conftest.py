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

from store_fixtures import pauses, proxy, server  # the path comes first

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
    assert list(place.iterdir()) == []
