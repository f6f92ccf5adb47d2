from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

spec = importlib.util.spec_from_file_location("tfrecord_fuzz", Path(__file__).with_name("fuzz.py"))
assert spec is not None
assert spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def test_the_corpus_is_sound() -> None:
    for records in fuzz.corpus():
        file = b"".join(map(fuzz.framed, records))
        assert fuzz.read(file, file)


def test_mutated_files_are_read_or_refused() -> None:
    found = [fuzz.read(*files) for files in islice(fuzz.mutations(1), 100)]
    assert True in found
    assert False in found
