"""The tests here, and the processes they spawn, can import `behaviour_kit`; the host's number of cores changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("behaviour_kit")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch advises against more workers than cores; one test asks for that advice."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 64)
