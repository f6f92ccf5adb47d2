"""The path to the modules beside the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder that is not there yet."""
    return str(tmp_path / "cache")
