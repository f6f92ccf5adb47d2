from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

spec = importlib.util.spec_from_file_location("array_fuzz", Path(__file__).with_name("fuzz.py"))
assert spec is not None
assert spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def test_the_valid_index_is_sound(tmp_path: Path) -> None:
    assert fuzz.read(tmp_path, "idx", fuzz.index_file())


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    found = [fuzz.read(tmp_path, kind, data) for kind, data in islice(fuzz.mutations(1), 300)]
    assert True in found
    assert False in found
