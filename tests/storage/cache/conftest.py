"""Makes the modules beside the tests importable."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Returns the path of a folder that does not exist yet."""
    return str(tmp_path / "cache")
