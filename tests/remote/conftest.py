"""Makes remote_kit importable from the tests of this folder, and from the processes they spawn; folders of datasets go."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # in workers of every start method too


@pytest.fixture(autouse=True)
def private_folders_go(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where datasets make folders of their own; they are gone when the datasets are."""
    place = tmp_path_factory.mktemp("private")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    gc.collect()
    assert list(place.iterdir()) == []
