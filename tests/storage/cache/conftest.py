"""The path to the modules beside the tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder that is not there yet."""
    return str(tmp_path / "cache")
