"""Makes remote_kit importable from the tests here and from processes they spawn; a real store; datasets' private folders are
removed.
"""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.storage.store_fixtures import growing_patience, pauses, proxy, server

__all__ = ["growing_patience", "pauses", "private_folders_are_removed", "proxy", "server"]


@pytest.fixture(autouse=True)
def private_folders_are_removed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the folder in which datasets create their private folders, and checks that those are removed with the datasets."""
    place = tmp_path_factory.mktemp("private")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    gc.collect()
    pause, deadline = threading.Event(), monotonic() + 60
    while list(place.iterdir()) and monotonic() < deadline:  # a prefetcher may still be fetching its last shard
        pause.wait(0.02)
        gc.collect()  # a failed attempt that was repeated may have left its traceback
    assert list(place.iterdir()) == []
