"""Which changes `python -m tests.mutation` makes, what it leaves alone, and how it records the statements that a test reaches."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from tests.mutation import Mutant, Mutator, blocks_of, noted, sampled

SOURCE = '''"""A module of 1 page, and more."""

from __future__ import annotations

LIMIT: int = 4


class Steps:
    """Counts to 3."""

    def add(self, number: int = 0, *, is_quiet: bool = False) -> int:
        """Adds 2."""
        if number < 0 or not is_quiet:
            raise ValueError(f"{number + 1} is too few" + str(5))
        self.sum = number - LIMIT
        log.warning("at %d", 7)
        self.tell()
        return -number

    def __repr__(self) -> str:
        return "Steps" * 6
'''


def changed(mutant: Mutant) -> str:
    """Returns the line as changed by a mutant."""
    text = SOURCE.encode()
    whole = (text[: mutant.begin] + mutant.new.encode() + text[mutant.end :]).decode()
    ast.parse(whole)
    return whole.splitlines()[mutant.line - 1].strip()


def test_mutants_of_code_but_not_of_texts() -> None:
    assert [changed(mutant) for mutant in Mutator("some.py", SOURCE).found] == [
        "LIMIT: int = (5)",
        "def add(self, number: int = (1), *, is_quiet: bool = False) -> int:",
        "def add(self, number: int = 0, *, is_quiet: bool = True) -> int:",
        "if True:",
        "if False:",
        "if (number < 0 and (not is_quiet)):",
        "if (number <= 0) or not is_quiet:",
        "if number < (1) or not is_quiet:",
        "if number < 0 or (is_quiet):",
        "pass",
        "pass",
        "self.sum = (number + LIMIT)",
        "pass",
        "return None",
        "return (number)",
    ]


def test_mutant_has_its_block_of_statements() -> None:
    blocks = [ast.unparse(body[-1]).partition("\n")[0] for body in blocks_of(ast.parse(SOURCE))]
    assert blocks == ["return -number", "raise ValueError(f'{number + 1} is too few' + str(5))", "return 'Steps' * 6"]
    block_of = {mutant.source: mutant.block for mutant in Mutator("some.py", SOURCE).found}
    assert block_of["LIMIT: int = 4"] == -1
    assert block_of["self.tell()"] == 0
    assert block_of['raise ValueError(f"{number + 1} is too few" + str(5))'] == 1


def test_reached_blocks_are_recorded_in_a_file(tmp_path: Path) -> None:
    hits = tmp_path / "hits"
    hits.write_bytes(bytes(8))
    names: dict[str, type] = {}
    exec(compile(noted(SOURCE, 4, hits, 8), "some.py", "exec"), names)
    assert bytes(8) == hits.read_bytes()
    assert names["Steps"].__doc__ == "Counts to 3."
    with pytest.raises(ValueError, match="1 is too few5"):
        names["Steps"]().add()
    assert bytes([0, 0, 0, 0, 1, 1, 0, 0]) == hits.read_bytes()


def test_sample_has_mutants_of_each_file_and_depends_only_on_the_seed() -> None:
    found = Mutator("some.py", SOURCE).found
    files = {"a.py": found, "b.py": found[:2], "c.py": []}
    sample = sampled(files, 6, random.Random(3))
    assert len(sample) == 6
    assert sample == sampled(files, 6, random.Random(3))
    assert sample != sampled(files, 6, random.Random(4))
