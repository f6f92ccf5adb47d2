"""A reader killed while it downloads leaves no partial work; `python -m tests.remote.killed` is the long version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote.killed import Readers, new_folder
from tests.storage.store_kit import Server


@pytest.mark.slow(reason="readers are processes that import torch and are killed")
def test_reader_restarted_after_a_kill_reads_exactly_the_epoch(server: Server, tmp_path: Path) -> None:
    readers = Readers(new_folder(server), tmp_path, seed=1)
    for _ in range(2):
        readers.run_round()
    assert len(readers.kills) >= 3, readers.kills


def test_partial_copy_of_a_killed_reader_is_never_read_and_is_removed(server: Server, tmp_path: Path) -> None:
    readers = Readers(new_folder(server), tmp_path, seed=1)
    assert readers.run(0, "after_fetch", 0) == ([], False)
    assert len(readers.unpublished()) >= 1
    readers.check_cache_files()
    assert (readers.expected[0], True) == readers.run(0, "", 0)
    assert readers.unpublished_after_opening() == []
