"""Logs of a device are replayed on the simulated one: a correct log passes, and every mistake is detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shmload import ShmLoader
from tests.simulated_device.device import SimulatedDevice
from tests.simulated_device.device_log import Entry, Logged, load_log
from tests.simulated_device.device_replay import replay

Make = Callable[..., ShmLoader[Any]]
LOGS = sorted(Path(__file__).parent.glob("*.log.jsonl"))
ORIGIN, SYNTHETIC = load_log(Path(__file__).parent / "synthetic.log.jsonl")


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_stored_log_is_correct(path: Path) -> None:
    assert replay(load_log(path)[1]) == []


def test_handwritten_log_is_marked() -> None:
    assert ORIGIN["origin"].startswith("SYNTHETIC")


@pytest.mark.slow(reason="starts a worker and replays an epoch")
@pytest.mark.parametrize("seed", [1, 2])
def test_log_of_a_loader_is_saved_loaded_and_correct(seed: int, make: Make, tmp_path: Path) -> None:
    device = SimulatedDevice(Random(seed).randrange)
    logged = Logged(device)
    loader = make(logged)
    held = []
    for step, batch in enumerate(loader):
        device.step(step % 2)
        if step % 5 == 0:
            held.append(batch)
    del batch, held
    loader.close()
    logged.save(tmp_path / "made.log.jsonl", origin="a test")
    origin, entries = load_log(tmp_path / "made.log.jsonl")
    assert origin == {"version": 1, "device": "simulated device", "origin": "a test"}
    assert len(entries) == len(logged.log)
    assert {entry[0] for entry in entries} >= {"register", "copy", "record", "wait_on_stream", "keep_for", "unregister"}
    assert replay(entries) == []


def without(*left_out: Entry) -> list[Entry]:
    assert all(entry in SYNTHETIC for entry in left_out)
    return [entry for entry in SYNTHETIC if entry not in left_out]


def test_stream_that_does_not_wait_is_detected() -> None:
    text = "stream 5 reads the bytes of another batch, or reads too early"
    assert replay(without(("wait_on_stream", 5, 2)))[:2] == [f"entry 11: {text}", f"entry 12: {text}"]


def test_stream_that_waits_for_an_event_before_the_copy_is_detected() -> None:
    entries = list(SYNTHETIC)
    last = entries.index(("wait_on_stream", 5, 7))
    entries[last] = ("wait_on_stream", 5, 4)
    text = "stream 5 reads the bytes of another batch, or reads too early"
    assert replay(entries) == [f"entry {last + 1}: {text}", f"entry {last + 2}: {text}"]


def test_tensor_overwritten_before_it_was_read_is_detected() -> None:
    again = ("copy", [2, 16], "torch.int32", 0, 6, -1, 0, 4)
    text = "stream 5 reads the bytes of another batch, or reads too early"
    assert replay([*SYNTHETIC, again]) == [f"entry 24: {text}"]
    waits = [("record", 5, 8), ("wait_on_stream", 0, 8)]
    assert replay([*SYNTHETIC, *waits, again]) == []


def test_slot_reused_during_a_copy_is_detected() -> None:
    entries = without(("is_done", 1, True))
    assert replay(entries)[0] == "entry 12: stream 5 reads the bytes of another batch, or reads too early"


def test_memory_unregistered_during_a_copy_is_detected() -> None:
    end = "bytes from a piece ran after they were unregistered"
    found = [text for text in replay(without(("wait_on_host", 6))) if not text.startswith("entry")]
    assert found == [f"a copy of 128 {end}", f"a copy of 16 {end}"]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (("is_done", 1, False), "event 1 is not done although it, or a later one on its stream, was done before"),
        (("unregister", 4096, 0), "piece 0 is unregistered twice"),
        (("unregister", 4096, 2), "unregister uses piece 2, which no earlier entry has made"),
        (("is_done", 9, True), "is_done uses event 9, which no earlier entry has made"),
        (("keep_for", [2], 5, 9), "keep_for uses tensor 9, which no earlier entry has made"),
        (("copy", [5000], "torch.uint8", 0, 9, 1, 0, -1), "a copy of 5000 bytes at 0 of piece 1 exceeds it"),
    ],
)
def test_impossible_entry_is_detected(entry: Entry, text: str) -> None:
    assert f"entry {len(SYNTHETIC)}: {text}" in replay([*SYNTHETIC, entry])


def test_copy_of_another_size_is_detected() -> None:
    entries = [("unregister", 8192, 1) if entry == ("unregister", 4096, 1) else entry for entry in SYNTHETIC]
    assert replay(entries) == ["entry 27: piece 1 has 4096 bytes, but 8192 are unregistered"]


def test_log_of_another_version_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "new.log.jsonl"
    path.write_text('{"version": 2}\n')
    with pytest.raises(ValueError, match=r"new.log.jsonl is a device log of version 2; this reads version 1"):
        load_log(path)
