from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType


def test_unchanged_index_file_is_read(fuzz: ModuleType, tmp_path: Path) -> None:
    assert fuzz.read(tmp_path, "idx", fuzz.index_file())


def test_mutated_files_are_read_or_rejected(fuzz: ModuleType, tmp_path: Path) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path), 300)]
    assert True in found
    assert False in found
