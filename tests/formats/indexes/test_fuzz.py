from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType


def test_unchanged_indexes_are_used(fuzz: ModuleType, tmp_path: Path) -> None:
    assert all(fuzz.read(shard, name, index) for name, (shard, index) in fuzz.corpus(tmp_path).items())


def test_mutated_indexes_are_used_or_rebuilt(fuzz: ModuleType, tmp_path: Path) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path), 300)]
    assert True in found
