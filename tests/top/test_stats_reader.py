"""Control blocks with any content: complete ones are read, and others are an error but never a crash."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.stats_reader import ABI, StatsReader
from shmload._core.trainer import TrainerRing, control_nbytes
from shmload.engine.ring_reader import RingReader
from shmload.engine.stats import describe

SIZES = {"order_capacity": 256, "text_capacity": 64, "layout_capacity": 64}
NUM_SLOTS, NUM_WORKERS = 3, 2
NBYTES = control_nbytes(NUM_SLOTS, NUM_WORKERS, **SIZES)
READ_NBYTES = 512 + NUM_WORKERS * 192 + NUM_SLOTS * 1024  # header, workers' and slots' records: what a stats reader reads


def mapped(content: bytes) -> Mapping:
    fd = os.memfd_create("block")
    try:
        os.write(fd, content)
        return Mapping(fd, len(content), writable=False)
    finally:
        os.close(fd)


def made_ring() -> tuple[TrainerRing, Mapping]:
    fd = os.memfd_create("ring")
    try:
        os.truncate(fd, NBYTES)
        control = Mapping(fd, NBYTES)
    finally:
        os.close(fd)
    return TrainerRing(control, num_slots=NUM_SLOTS, num_workers=NUM_WORKERS, **SIZES), control


def block() -> bytes:
    """Returns a block with two orders of four chunks. Worker 0 holds one of them and is at its second row."""
    ring, control = made_ring()
    ring.introduce(dataset_name=b"Rows", read_path=b"read_into", rank=1, world_size=2)
    for step in range(2):
        ring.publish(ring.hold(), epoch=5, step=step, indices=np.arange(8), nrows=8, nchunks=4)
    worker = WorkerRing(control, 0)
    worker.announce()
    assert worker.claim()
    worker.begin_row(1, 17)
    return bytes(control)


BLOCK = block()


def damaged(words: dict[int, int]) -> bytes:
    content = np.frombuffer(BLOCK, np.uint64).copy()
    for word, value in words.items():
        content[word] = value
    return content.tobytes()


def test_snapshot_contains_what_the_trainer_has_written() -> None:
    seen = StatsReader(mapped(BLOCK)).snapshot()
    assert seen["owner_pid"] == os.getpid()
    assert (seen["num_slots"], seen["num_workers"], seen["control_nbytes"]) == (NUM_SLOTS, NUM_WORKERS, NBYTES)
    assert (seen["dataset_name"], seen["read_path"], seen["rank"], seen["world_size"]) == ("Rows", "read_into", 1, 2)
    assert seen["time_ns"] > seen["owner_start_ns"] > 0
    ordered = [slot for slot in seen["slots"] if slot["state"] == 2]
    assert [(slot["order"], slot["epoch"], slot["step"], slot["num_open"]) for slot in ordered] == [(1, 5, 0, 3), (2, 5, 1, 4)]
    assert [slot["claims"] for slot in ordered] == [[(0, 0, 2)], []]
    assert [(worker["index"], worker["now"]) for worker in seen["workers"]] == [(17, 1 << 16 | 1), (0, 0)]
    assert seen["workers"][0]["since_ns"] >= seen["workers"][0]["claimed_ns"] >= seen["workers"][0]["started_ns"] > 0


def test_long_names_are_truncated() -> None:
    ring, control = made_ring()
    ring.introduce(dataset_name=b"D" * 99, read_path=b"p" * 99, rank=0, world_size=1)
    seen = StatsReader(control).snapshot()
    assert (seen["dataset_name"], seen["read_path"]) == ("D" * 23, "p" * 15)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BLOCK[:511], "the file is not a control block: it has 511 bytes, fewer than the 512 of a header"),
        (bytes(NBYTES), "the file is not a control block, or is still being created: it does not begin with SHMLOLD1"),
        (
            damaged({1: NUM_SLOTS << 32 | 77}),
            f"the control block has layout version 77, and this shmload reads version {ABI}: use the shmload that its trainer",
        ),
        (
            damaged({1: (1 << 20) << 32 | ABI}),
            "the control block is damaged: 1048576 slots with orders of 256 and texts of 64 bytes, 2 workers and a layout of 64 "
            f"bytes do not fit its {NBYTES} bytes",
        ),
        (damaged({4: 8}), f"the control block is damaged: its offsets do not match 3 slots and 2 workers in {NBYTES} bytes"),
        (BLOCK[:2048], "the control block is damaged: 3 slots with orders of 256 and texts of 64 bytes, 2 workers and a layout"),
        (BLOCK[:4096], "the control block is damaged: its offsets do not match 3 slots and 2 workers in 4096 bytes"),
    ],
)
def test_incomplete_block_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        StatsReader(mapped(content))
    assert str(caught.value).startswith(message)


def test_impossible_slot_is_refused() -> None:
    state = (512 + NUM_WORKERS * 192 + 600) // 8  # layout and state of slot 0
    with pytest.raises(ValueError, match="the control block is damaged: slot 0 has state 77 and 4 chunks"):
        StatsReader(mapped(damaged({state: 77 << 32}))).snapshot()


def described_or_none(content: bytes) -> dict[str, Any] | None:
    """Returns the described content of a block, or None if it is refused."""
    try:
        stats_reader = StatsReader(mapped(content))
        seen = stats_reader.snapshot()
        return describe(stats_reader.snapshot(), seen) | {"whole": describe(seen)}
    except ValueError as error:
        message = str(error)
    assert "control block" in message
    return None


@given(st.binary(min_size=1, max_size=2 * READ_NBYTES))
def test_random_bytes_are_refused(content: bytes) -> None:
    assert described_or_none(content) is None
    assert described_or_none(BLOCK[:16] + content) is None or content.startswith(BLOCK[16:104])


words = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 4096)
)


@given(st.dictionaries(st.integers(2, READ_NBYTES // 8 - 1), words, max_size=12))
@example({})
def test_block_with_damaged_words_is_refused_or_described(changes: dict[int, int]) -> None:
    found = described_or_none(damaged(changes))
    if not changes:
        assert found is not None
        assert found["slots"]["filling"] == 2
    if found is not None:
        assert sum(found["time"].values()) == pytest.approx(100)
        assert len(found["workers"]) == NUM_WORKERS


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Returns a list of how blocks are opened and mapped: (access mode of the descriptor, whether the mapping is writable)."""
    found = []

    def note(fd: int, nbytes: int, *, writable: bool = True) -> Mapping:
        mapping = Mapping(fd, nbytes, writable=writable)
        found.append((fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE, not memoryview(mapping).readonly))
        return mapping

    monkeypatch.setattr("shmload.engine.ring_reader.Mapping", note)
    return found


def test_block_is_opened_and_mapped_read_only(tmp_path: Path, opened: list[tuple[int, bool]]) -> None:
    path = tmp_path / "block"
    path.write_bytes(BLOCK)
    assert RingReader.open(str(path)).snapshot()["num_slots"] == NUM_SLOTS
    assert opened == [(os.O_RDONLY, False)]


def test_empty_or_special_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is not a control block: it is empty"):
        RingReader.open(str(tmp_path / "empty"))
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(OSError, match="symbolic links"):
        RingReader.open(str(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a control block: it is empty"):
        RingReader.open(str(tmp_path / "pipe"))
    with pytest.raises(FileNotFoundError):
        RingReader.open(str(tmp_path / "nothing"))
