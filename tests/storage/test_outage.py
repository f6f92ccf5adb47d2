"""A store that stops answering: operations on other objects fail as soon as one operation has used up its tries."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from time import monotonic

import pytest

from shmload.errors import StoreError
from shmload.storage import retry
from shmload.storage.outage import Outage
from shmload.storage.retry import Retry, RetryPolicy, TransientError

SILENT = TransientError("no answer", of_store=True, is_silent=True)
REFUSING = TransientError("503", of_store=True)
OF_OBJECT = TransientError("the body ended")
PATIENCE = RetryPolicy(retries=2, stall_s=60)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_wait", lambda pause_s: None)


@pytest.fixture
def outage(tmp_path: Path) -> Outage:
    return Outage(str(tmp_path / "record"))


def num_tries(retry: Retry, failure: TransientError) -> int:
    """Returns the number of tries of an operation that never succeeds."""
    for number in range(1, 10):
        try:
            retry.failed(failure)
        except StoreError:
            return number
    raise AssertionError("the operation is retried forever")


def test_operation_on_a_silent_store_fails_at_once_after_another_used_up_its_tries(outage: Outage) -> None:
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    with pytest.raises(StoreError, match=r"cannot read x: no answer; failed 3 times"):
        Retry(PATIENCE, "read y", outage)


def test_operation_on_a_refusing_store_is_tried_once_after_another_used_up_its_tries(outage: Outage) -> None:
    assert num_tries(Retry(PATIENCE, "read x", outage), REFUSING) == 3
    assert num_tries(Retry(PATIENCE, "read y", outage), REFUSING) == 1


def test_running_operation_fails_once_another_used_up_its_tries(outage: Outage) -> None:
    other = Retry(PATIENCE, "read y", outage)
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    with pytest.raises(StoreError, match="cannot read x: "):
        other.failed(SILENT)


def test_operation_waiting_for_its_next_try_fails_once_another_used_up_its_tries(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Retry(PATIENCE, "read y", outage)
    monkeypatch.setattr(retry, "_wait", lambda pause_s: outage.record("cannot read x", monotonic(), is_silent=True))
    with pytest.raises(StoreError, match="cannot read x"):
        other.failed(SILENT)


def test_failure_of_one_object_does_not_affect_others(outage: Outage) -> None:
    assert num_tries(Retry(PATIENCE, "read x", outage), OF_OBJECT) == 3
    assert num_tries(Retry(PATIENCE, "read y", outage), SILENT) == 3


def test_successful_read_ends_the_outage(outage: Outage) -> None:
    under_way = Retry(PATIENCE, "read y", outage)
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    under_way.succeeded()
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3


def test_next_pass_retries_and_ignores_late_failures_of_the_last_pass(outage: Outage) -> None:
    late = Retry(PATIENCE, "read y", outage)
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    outage.try_again()
    assert num_tries(late, SILENT) == 3
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    with pytest.raises(StoreError, match="cannot read x"):
        Retry(PATIENCE, "read y", outage)


def test_outage_is_over_after_stall_s(outage: Outage) -> None:
    hasty = RetryPolicy(retries=0, stall_s=0)
    assert num_tries(Retry(hasty, "read x", outage), SILENT) == 1
    assert num_tries(Retry(hasty, "read x", outage), SILENT) == 1


def test_existing_process_shares_the_outage_and_a_new_one_retries(outage: Outage) -> None:
    there_before = pickle.loads(pickle.dumps(outage))
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    with pytest.raises(StoreError, match="cannot read x"):
        Retry(PATIENCE, "read y", there_before)
    Retry(PATIENCE, "read y", pickle.loads(pickle.dumps(outage)))


@pytest.mark.parametrize("text", [b"", b"[]", b'{"text": 1}', b'{"text": "x", "at": 1e300, "is_silent": true}', b"\xff"])
def test_damaged_record_is_ignored(outage: Outage, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "record").write_bytes(text)
    assert outage.since(0) is None


def test_unwritable_record_is_ignored(tmp_path: Path) -> None:
    outage = Outage(str(tmp_path / "gone" / "record"))
    assert num_tries(Retry(PATIENCE, "read x", outage), SILENT) == 3
    outage.try_again()
    outage.end()
    assert num_tries(Retry(PATIENCE, "read y", outage), SILENT) == 3


def test_threads_of_a_process_share_the_outage(outage: Outage) -> None:
    thread = threading.Thread(target=num_tries, args=(Retry(PATIENCE, "read x", outage), SILENT))
    thread.start()
    thread.join()
    with pytest.raises(StoreError, match="cannot read x"):
        Retry(PATIENCE, "read y", outage)
