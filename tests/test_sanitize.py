"""The reports that `python -m tests.sanitize` collects: every kind of report, one line per place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPORTS = """
=================================================================
==812==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60b000 at pc 0x7f bp 0x7f sp 0x7f
src/resample.h:88:21: runtime error: signed integer overflow: 2147483647 + 1 cannot be represented in type 'int'
WARNING: ThreadSanitizer: data race (pid=812)
  Write of size 4 at 0x7b04 by thread T1:
"""


@pytest.fixture
def sanitize() -> ModuleType:
    """Returns the module, which is a command outside of any package."""
    spec = importlib.util.spec_from_file_location("sanitize", Path(__file__).with_name("sanitize.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_of_all_processes_are_counted_by_place(sanitize: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.812").write_text(REPORTS)
    (tmp_path / "report.813").write_text(REPORTS.replace("812", "813").replace("0x60b000", "0x60b111"))
    (tmp_path / "other").write_text(REPORTS)
    found = sanitize.reports_in(tmp_path)
    assert list(found.values()) == [2, 2, 2]
    assert [line.split(":")[0] for line in found] == ["ERROR", "src/resample.h", "WARNING"]


def test_copy_does_not_touch_unchanged_files(sanitize: ModuleType, tmp_path: Path) -> None:
    """Otherwise every module would be built again each time."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    (root / "src").mkdir(parents=True)
    copy.mkdir()
    sanitize.ROOT, sanitize.COPIED = root, ("src", "setup.py")
    for name in ("src/a.pyx", "src/b.pyx", "setup.py"):
        (root / name).write_text(name)
    sanitize.copy_tree(copy)
    before = (copy / "src/a.pyx").stat().st_mtime_ns
    (root / "src/a.pyx").write_text("src/a.pyx")
    (root / "src/b.pyx").write_text("changed")
    sanitize.copy_tree(copy)
    assert (copy / "src/a.pyx").stat().st_mtime_ns == before
    assert (copy / "src/b.pyx").read_text() == "changed"
