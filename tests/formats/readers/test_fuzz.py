from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest


def test_unchanged_files_are_read(fuzz: ModuleType, tmp_path: Path) -> None:
    for suffix, files in fuzz.corpus(tmp_path).items():
        assert files
        assert all(fuzz.read(suffix, data, tmp_path) for data in files)


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_mutated_files_are_read_or_rejected(fuzz: ModuleType, tmp_path: Path, suffix: str) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path, suffix), 100)]
    assert True in found
    assert False in found
