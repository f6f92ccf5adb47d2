"""The path to the kit and the program beside the tests, and to the fault tests' kit; a loader that stands still."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "faults"))

from live_kit import running  # the path comes first


@pytest.fixture(scope="module")
def still() -> Iterator[int]:
    """The pid of a trainer that stands still: it holds two batches, and four are ready."""
    with running("still") as program:
        yield program.pid
