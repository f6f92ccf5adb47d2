from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("readers_fuzz", Path(__file__).with_name("fuzz.py"))
assert spec is not None
assert spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def test_the_corpus_is_sound(tmp_path: Path) -> None:
    for suffix, files in fuzz.corpus(tmp_path).items():
        assert files
        assert all(fuzz.read(suffix, data, tmp_path) for data in files)


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_mutated_files_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    found = [fuzz.read(*each, tmp_path) for each in islice(fuzz.mutations(1, (suffix,), tmp_path), 100)]
    assert True in found
    assert False in found
