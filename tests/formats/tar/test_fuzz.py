from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType


def test_unchanged_shards_are_read(fuzz: ModuleType) -> None:
    assert all(fuzz.read(shard) for shard in fuzz.corpus())


def test_mutated_shards_are_read_or_rejected(fuzz: ModuleType, tmp_path: Path) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path), 1000)]
    assert True in found
    assert False in found
