"""Lets the tests here, and the processes they spawn, import their datasets."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shmload.shm.group import Group  # the path comes first


@pytest.fixture(autouse=True, scope="module")
def one_reaper() -> Iterator[None]:
    """Keeps the reaper up between indexes: to start one for each of a property's examples takes most of their time."""
    group = Group()
    yield
    group.close()
