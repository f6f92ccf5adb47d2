"""Everything public is described, and the docstrings' examples run."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import shmload
from tests.reference.commands import undescribed
from tests.reference.docstrings import markdown, parse
from tests.reference.pages import FOLDER, pages
from tests.reference.public import missing

pytestmark = pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="an installed package is being tested")

WITH_EXAMPLES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(shmload.__path__, "shmload.")
    if (path := Path(*shmload.__path__, *name.split(".")[1:]).with_suffix(".py")).exists() and ">>> " in path.read_text()
)


def test_everything_public_is_described() -> None:
    assert list(missing()) == []


def test_every_command_and_option_is_described() -> None:
    assert list(undescribed()) == []


def test_committed_pages_match_the_docstrings() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert committed == pages(), "`python -m tests.reference` writes docs/api/ again"


def test_headings_of_a_page_are_unique() -> None:
    """Repeated headings would have anchors that differ between a forge and the site."""
    headings = Counter((path, line) for path in FOLDER.iterdir() for line in path.read_text().splitlines() if line.startswith("#"))
    assert [heading for heading, times in headings.items() if times > 1] == []


def test_every_group_of_arguments_has_a_heading() -> None:
    page = (FOLDER / "loader.md").read_text()
    assert "\n### ShmLoader: workers\n\n* `num_workers`: number" in page


def test_help_names_the_repository_that_has_the_pages() -> None:
    """An installed package has no docs/, whose pages its docstrings name."""
    url = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert all(f"{url}." in (described.__doc__ or "") for described in (shmload, shmload.ShmLoader))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module_print_the_shown_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_docstring_is_parsed() -> None:
    found = parse(
        """What it does.

        Why, on
        two lines.

        Args:
            one: of
                two lines.
            two, three: alike.
        Returns:
            a thing, shape `(n,)`.
        Raises:
            ValueError: it is not.
        Cost: one
            copy.
        Example:
            >>> 1 + 1
            2
        """
    )
    assert found.summary == "What it does."
    assert found.prose == "Why, on\ntwo lines."
    assert found.items == {
        "Args": {("one",): "of two lines.", ("two", "three"): "alike."},
        "Raises": {("ValueError",): "it is not."},
    }
    assert found.texts == {"Returns": "a thing, shape `(n,)`.", "Cost": "one copy.", "Example": ">>> 1 + 1\n2"}
    assert found.names("Args", "Raises") == {"one", "two", "three", "ValueError"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("its __len__ and a * b < c", "its \\_\\_len\\_\\_ and a \\* b &lt; c"),
        ("`__len__` of `a *\nb` stays", "`__len__` of `a *\nb` stays"),
        ("num_workers stays", "num_workers stays"),
        ("docs/own_format.md says", "[own_format.md](../own_format.md) says"),
        ("| a_ | * |", "| a_ | * |"),
    ],
)
def test_special_characters_of_prose_are_escaped(text: str, wanted: str) -> None:
    assert markdown(text) == wanted


class Described:
    """A class whose argument is described.


    Args:
        one: described.
        two: does not exist.
    """

    __module__ = "shmload.made_up"

    def __init__(self, one: int) -> None:
        raise ValueError(one)

    def member(self, other: int) -> None:
        """A method that does not describe its argument"""

    @property
    def silent(self) -> int:
        return 1


def test_undescribed_names_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shmload.made_up", sys.modules[__name__])
    monkeypatch.setattr("tests.reference.public.names", lambda: {"made_up.Described": Described})
    assert list(missing()) == [
        "made_up.Described: describes arguments that do not exist: two",
        "made_up.Described: raises ValueError, which its docstring does not mention",
        "made_up.Described.member: its first line is not a sentence: 'A method that does not describe its argument'",
        "made_up.Described.member: argument other is not described",
        "made_up.Described.silent: has no docstring",
    ]
