"""The examples of docs/ run, page by page, and print what the page says.

What an example prints stands in a comment behind its print, or in the text block after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

WITHOUT_OUTPUT = ("frameworks.md", "migration.md")  # fragments of other programs
DOCS = next(p / "docs" for p in Path(__file__).parents if (p / "docs").exists())


@pytest.mark.slow
@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md")) if path.name not in WITHOUT_OUTPUT])
def test_the_examples_of_a_page_print_what_they_say(page: str, output_of: Callable[[str], str]) -> None:
    text = (DOCS / page).read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    expected = (
        re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        or "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL)).splitlines()
    )
    assert len(expected) >= code.count("print(")
    assert expected == output_of(code).splitlines()
