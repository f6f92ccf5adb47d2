"""The examples of docs/ run, page by page, and print what the page says.

What an example prints stands in a comment behind its print, or in the text block after it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = next(p / "docs" for p in Path(__file__).parents if (p / "docs").exists())


@pytest.mark.slow
@pytest.mark.parametrize("page", ["samples.md", "sampling.md", "tfrecord.md"])
def test_the_examples_of_a_page_print_what_they_say(page: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    expected = (
        re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        or "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL)).splitlines()
    )
    assert len(expected) >= code.count("print(")
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
