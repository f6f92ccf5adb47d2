"""The README's examples run, and its commands are the ones that CI runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = next(p / "README.md" for p in Path(__file__).parents if (p / "README.md").exists())
README = PAGE.read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXPECTED = ["torch.Size([2, 2])", "4 batches left"]


@pytest.mark.slow(reason="an example runs as a separate program")
@pytest.mark.parametrize(("code", "expected"), list(zip(EXAMPLES, EXPECTED, strict=True)))
def test_example_prints_the_shown_output(code: str, expected: str, output_of: Callable[[str], str]) -> None:
    assert expected in output_of(code)


def test_readme_has_one_command_for_the_main_job_and_one_for_the_tests() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("shmload bench --rounds 1 --plot bench.png")
    assert commands[1].endswith("-m pytest")


@pytest.mark.skipif(not PAGE.with_name("CONTRIBUTING.md").exists(), reason="an installed package is tested without CONTRIBUTING.md")
def test_figure_is_drawn_again_by_the_command_that_the_readme_shows() -> None:
    (shown,) = re.findall(r"(shmload bench .*--plot )bench\.png$", README, re.MULTILINE)
    assert f"{shown}docs/bench.png" in PAGE.with_name("CONTRIBUTING.md").read_text()
