"""The examples of docs/ run, one after another, and print what stands behind them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = next(p / "docs" for p in Path(__file__).parents if (p / "docs").exists())


@pytest.mark.slow
@pytest.mark.parametrize("page", ["sampling.md"])
def test_the_examples_of_a_page_print_what_they_say(page: str, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(expected) == code.count("print(")
    script = tmp_path / "examples.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert expected == done.stdout.splitlines()
