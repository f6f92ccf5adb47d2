"""The tests here, and the processes they spawn, can import `behaviour_kit`; the host's number of cores changes nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("behaviour_kit")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch advises against more workers than cores; one test asks for that advice."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 64)


@pytest.fixture(scope="package", autouse=True)
def quick_collections() -> Iterator[None]:
    """Every program here ends with a collection; what was imported before need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
