"""The example of docs/audit.md runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = next(p / "docs/audit.md" for p in Path(__file__).parents if (p / "docs/audit.md").exists()).read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def test_the_example_proves_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(compile(EXAMPLE, "docs/audit.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == "proven: every sample exactly once\n3 batches were rolled back\n"
