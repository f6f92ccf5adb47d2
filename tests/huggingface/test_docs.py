"""The example of docs/huggingface.md runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = next(p / "docs/huggingface.md" for p in Path(__file__).parents if (p / "docs/huggingface.md").exists())
((EXAMPLE, PRINTED),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLE, "docs/huggingface.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == PRINTED
