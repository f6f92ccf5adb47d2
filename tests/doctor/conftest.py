"""Fake hosts made of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shmload.shm.host import Host
from shmload.tools.doctor import CheckResult, Finding

Tree = dict[str, str]


def finding_of(result: CheckResult) -> Finding:
    """Returns the result of a check as the finding that `examine` makes of it."""
    return Finding("check", "good", result) if isinstance(result, str) else Finding("check", *result)


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Host]:
    """Returns a function that makes a host from files (path -> text) and other arguments of Host."""

    def make(files: Tree | None = None, **other: object) -> Host:
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Host(root=tmp_path, **{"environ": {}, "pid": 7, **other})  # type: ignore[arg-type]  # arguments of the tests

    return make
