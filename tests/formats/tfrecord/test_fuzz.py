from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType


def test_the_corpus_is_sound(fuzz: ModuleType) -> None:
    for records in fuzz.corpus():
        file = b"".join(map(fuzz.framed, records))
        assert fuzz.read(file, file)


def test_mutated_files_are_read_or_refused(fuzz: ModuleType, tmp_path: Path) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path), 100)]
    assert True in found
    assert False in found
