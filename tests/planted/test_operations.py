"""Defects are planted by function and syntax, wherever and however the code is written."""

from __future__ import annotations

import pytest

from tests.planted.operations import PlantingError, Replace, changed, file_of, omit

PROGRAM = """
class Reader:
    def read(self, path, *, is_new=True):  # é
        if path and not self.is_closed:
            for line in open(path):
                self.lines.append(
                    line,  # of the file
                )
            self.count += 1
        try:
            return self.made("x", is_new=is_new, step=1)
        except OSError: return f"{path} of {self}"

def read(path):
    return path
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Replace("step=1", "step=2"), 'made("x", is_new=is_new, step=2)'),
        (Replace("is_new=is_new", ""), 'made("x", step=1)'),
        (Replace("step=1", ""), 'made("x", is_new=is_new, )'),
        (Replace("self.lines.append(line)", "self.lines.append(line * 2)"), "            self.lines.append(line * 2)\n"),
        (Replace("'x'", "'y'"), "made('y', is_new"),
        (omit("self.count += 1"), "            pass\n        try:"),
        (Replace("self.count += 1", "a()\nb()"), "            a()\n            b()\n"),
        (
            omit("for line in open(path):\n    self.lines.append(line)\nself.count += 1"),
            "is_closed:\n            pass\n        try",
        ),
        (Replace("if path and not self.is_closed:", "if path:"), "        if path:\n            for line"),
        (Replace("except OSError:", "except (OSError, ValueError):"), "        except (OSError, ValueError): return f"),
        (Replace('f"{path} of {self}"', "None"), "return None\n"),
        (Replace("True", "False"), "is_new=False):  # é\n"),
    ],
    ids=lambda value: value.old if isinstance(value, Replace) else "",
)
def test_code_is_found_by_its_syntax(change: Replace, expected: str) -> None:
    text = changed(PROGRAM, "Reader.read", change)
    assert expected in text
    compile(text, "program.py", "exec")
    assert text.endswith("def read(path):\n    return path\n")


@pytest.mark.parametrize("old", ["nothing()", "path", "self.is_closed or path", "return path"])
def test_code_that_is_missing_or_not_unique_is_an_error(old: str) -> None:
    with pytest.raises(PlantingError, match=r"to be replaced \d times instead of once"):
        changed(PROGRAM, "Reader.read", omit(old))


def test_other_functions_of_the_name_and_the_top_level_are_told_apart() -> None:
    assert changed(PROGRAM, "program:read", omit("return path")).endswith("def read(path):\n    pass\n")
    assert changed("import a\ndef f(): b\n", "program:", Replace("import a", "a = 1")) == "a = 1\ndef f(): b\n"


def test_text_of_a_file_without_a_parser_is_quoted() -> None:
    assert changed("if (a < b) go();", "src/ring.h", Replace("a < b", "a <= b")) == "if (a <= b) go();"
    with pytest.raises(PlantingError, match="2 times"):
        changed("a a", "src/ring.h", Replace("a", "b"))


def test_file_is_found_by_the_name_of_a_function() -> None:
    assert file_of("ShmLoader.state_dict") == "shmload/loader.py"
    assert file_of("loader:") == "shmload/loader.py"
    assert file_of("src/layout.h") == "src/layout.h"
    with pytest.raises(PlantingError, match=r"^main names [2-9] functions of the package instead of one: shmload"):
        file_of("main")
    with pytest.raises(PlantingError, match="no_such_function names 0 functions of the package instead of one: none"):
        file_of("no_such_function")
