"""The examples of docs/shared_index.md run and print what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = [
    "<SharedIndex of 1000 entries, tuple(0: str, 1: int64), 33024 bytes shared>\n('/data/0000999.jpg', 9) 4500\n",
    "/data/0000999.jpg\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_an_example_prints_what_it_should(number: int, tmp_path: Path) -> None:
    text = next(p / "docs" for p in Path(__file__).parents if (p / "docs").exists()) / "shared_index.md"
    examples = re.findall(r"```python\n(.*?)```", text.read_text(), re.DOTALL)
    assert len(examples) == len(EXPECTED)
    script = tmp_path / "example.py"
    script.write_text(examples[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert done.stdout == EXPECTED[number]
