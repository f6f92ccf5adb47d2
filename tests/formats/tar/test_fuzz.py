from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

spec = importlib.util.spec_from_file_location("tar_fuzz", Path(__file__).with_name("fuzz.py"))
assert spec is not None
assert spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def test_the_corpus_is_sound() -> None:
    assert all(fuzz.read(shard) for shard in fuzz.corpus())


def test_mutated_shards_are_read_or_refused() -> None:
    found = [fuzz.read(shard) for shard in islice(fuzz.mutations(1), 1000)]
    assert True in found
    assert False in found
