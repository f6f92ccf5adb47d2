"""Fixtures that write tar shards."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Make = Callable[..., Path]


@pytest.fixture
def tar_of(tmp_path: Path) -> Make:
    """Returns a function that writes (name, bytes) pairs with Python's tarfile, in one of its formats."""

    def make(members: Sequence[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, name: str = "a.tar") -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w", format=format) as archive:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return make
