"""Audit files: written records are read back, and torn, damaged or foreign files are reported without an exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload.audit.audit_file import AuditLog, Batch, Event, batch_record, event_record, header_line, read_log
from tests.audit.audit_kit import make, run, verdict_of

U64 = st.integers(0, 2**64 - 1)
KEYS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(lambda keys: np.array(keys, np.int64)),
    st.lists(st.one_of(st.text(), st.integers(), st.none(), st.lists(st.integers(), max_size=2)), max_size=5),
    st.none(),
)
CHANGES = st.lists(st.tuples(st.integers(0, 99), st.integers(), st.none() | st.integers(), st.integers(0, 9)), max_size=3)
BATCHES = st.builds(Batch, U64, U64, U64, st.integers(0, 2**32 - 1), KEYS, U64, st.booleans(), CHANGES.map(tuple))


def plain(batch: Batch) -> Any:
    keys = batch.keys.tolist() if isinstance(batch.keys, np.ndarray) else batch.keys
    return (batch.time_ns, batch.epoch, batch.step, batch.valid, keys, batch.digest, batch.is_partial, batch.changes)


def read(folder: Path, content: bytes) -> AuditLog:
    path = folder / "rank-0000-x.shmaudit"
    path.write_bytes(content)
    return read_log(path)


@given(st.lists(BATCHES, max_size=4))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_records_are_read_back(tmp_path: Path, batches: list[Batch]) -> None:
    content = header_line({"a": 1}) + b"".join(map(batch_record, batches)) + event_record("end", {"epoch": 3})
    log = read(tmp_path, content)
    assert (log.header, log.damage, log.is_torn) == ({"a": 1}, [], False)
    assert [plain(batch) for batch in batches] == [plain(r) for r in log.records if isinstance(r, Batch)]
    assert log.records[-1] == Event("end", {"epoch": 3}, log.records[-1].offset)


def test_keys_that_json_cannot_represent_are_kept_as_text(tmp_path: Path) -> None:
    keys: list[Any] = [("a", 1), b"raw", np.int64(5), {1.5: (2,)}, {(1, 2): 3}]
    read_keys = []
    for key in keys:
        log = read(tmp_path, header_line({}) + batch_record(Batch(0, 0, 0, 1, [key], 0)))
        assert isinstance(log.records[0], Batch)
        read_keys.append(log.records[0].keys)
    assert read_keys == [[["a", 1]], ["b'raw'"], [5], [{"1.5": [2]}], ["{(1, 2): 3}"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("recorded")
    run([make(folder, dataset=[(i, i) for i in range(9)])])
    return next(folder.iterdir()).read_bytes()


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_file_truncated_anywhere_is_torn_and_not_damaged(tmp_path: Path, recorded: bytes, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(recorded) - 1))
    log = read(tmp_path, recorded[:size])
    assert log.damage == []
    ends = [record.offset for record in read(tmp_path, recorded).records]
    is_whole = size in ends
    assert log.is_torn != is_whole


def test_format_version_0_is_unknown(tmp_path: Path, recorded: bytes) -> None:
    assert recorded.startswith(b"shmaudit 1 ")
    log = read(tmp_path, b"shmaudit 0 " + recorded[11:])
    assert log.damage == ["offset 0: this is not an audit file: it does not begin with a 'shmaudit' line"]


@given(st.data())
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_flipped_bit_is_reported_with_its_offset(tmp_path: Path, recorded: bytes, data: st.DataObject) -> None:
    place, bit = data.draw(st.integers(0, len(recorded) - 1)), data.draw(st.integers(0, 7))
    content = bytearray(recorded)
    content[place] ^= 1 << bit
    log = read(tmp_path, bytes(content))
    assert log.damage or log.is_torn
    assert all(line.startswith("offset ") for line in log.damage)
    assert verdict_of(tmp_path).status == 1 or log.is_torn


@given(st.binary(max_size=300))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_random_bytes_never_raise(tmp_path: Path, recorded: bytes, noise: bytes) -> None:
    header = recorded[: recorded.index(b"\n") + 1]
    for content in (noise, b"shmaudit " + noise, b"shmaudit 1 " + noise + b"\n" + noise, header + noise, recorded + noise):
        log = read(tmp_path, content)
        assert log.damage or log.is_torn or not noise
        assert verdict_of(tmp_path).status in (0, 1, 3, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"something else\n", "offset 0: this is not an audit file"),
        (b"shmaudit 9 00000000 {}\n", "format version 9, this shmload reads up to 1: install a newer one"),
        (b"shmaudit 1 00000000 {}\n", "offset 0: the header line is damaged: its checksum differs"),
        (header_line([]), "offset 0: the header line holds no JSON object"),  # type: ignore[arg-type]  # not a mapping, on purpose
    ],
)
def test_unusable_header_is_reported_with_its_cause(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in "".join(read(tmp_path, content).damage)


def test_header_with_missing_fields_is_reported(tmp_path: Path) -> None:
    read(tmp_path, header_line({"mode": "seed"}))
    report = verdict_of(tmp_path)
    assert "rank-0000-x.shmaudit, offset 0: the header cannot be used: " in report.findings[0].text
    assert "rank is None" in report.findings[0].text


def test_record_of_an_unknown_kind_is_reported(tmp_path: Path) -> None:
    log = read(tmp_path, header_line({}) + event_record("other", {}) + event_record("end", {}))
    assert "a record has the unknown kind other" in log.damage[0]
    assert len(log.records) == 1
