"""Lets the tests here, and the processes they spawn, import their datasets."""

from collections.abc import Iterator

import pytest

from shmload.shm.segment_group import SegmentGroup


@pytest.fixture(autouse=True, scope="module")
def one_reaper() -> Iterator[None]:
    """Keeps the reaper up between indexes: to start one for each of a property's examples takes most of their time."""
    group = SegmentGroup()
    yield
    group.close()
