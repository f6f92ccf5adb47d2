"""A reader killed while it downloads leaves nothing half done; the long version is killed.py, run by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote.killed import Readers, new_folder
from tests.storage.store_kit import Server


@pytest.mark.slow(reason="readers are processes that import torch and are killed")
def test_a_reader_that_was_killed_reads_exactly_the_epoch_when_it_is_begun_again(server: Server, tmp_path: Path) -> None:
    readers = Readers(new_folder(server), tmp_path, seed=1)
    for _ in range(2):
        readers.once()
    assert len(readers.kills) >= 3, readers.kills


def test_a_half_written_copy_of_a_killed_reader_is_seen_by_nobody_and_goes(server: Server, tmp_path: Path) -> None:
    readers = Readers(new_folder(server), tmp_path, seed=1)
    assert readers.run(0, "after_fetch", 0) == ([], False)
    assert len(readers.being_written()) >= 1
    readers.look()
    assert (readers.expected[0], True) == readers.run(0, "", 0)
    assert readers.left_behind() == []
