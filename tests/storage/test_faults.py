"""Servers and networks that fail: temporary failures are retried, permanent ones are one clear error, and wrong bytes are never
returned.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload.errors import ObjectMissing, StoreError
from shmload.remote import make_client
from shmload.storage import retry, s3_store, web_reader
from shmload.storage.http_store import HttpStore
from shmload.storage.range_target import MemoryTarget
from shmload.storage.s3_store import S3Store
from tests.storage import store_kit
from tests.storage.fault_proxy import Fault, FaultProxy, Garbage, Header, Length, Refuse, Reset, Stall, Status, Trickle, Truncate

slow = pytest.mark.slow(reason="hypothesis has a real S3 server fail in many ways")
DATA = np.random.default_rng(5).bytes(300_000)
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>less, please</Message></Error>"
PASSING = {
    "reset at once": Reset(),
    "reset in the head": Reset(50),
    "reset in the body": Reset(20_000),
    "refused": Refuse(),
    "503": Status(503, SLOW_DOWN),
    "500": Status(500),
    "502 of a proxy": Status(502, b"<html>bad gateway</html>"),
    "429": Status(429),
    "truncated at once": Truncate(),
    "truncated": Truncate(10),
    "longer than it says": Length(-1),
    "shorter than it says": Length(+1),
    "garbage": Garbage(),
    "a status line alone": Garbage(b"HTTP/1.1 200 OK\r\n"),
    "clock of the server": Status(503, headers=(("Retry-After", "3"),)),
}
OPERATIONS: dict[str, Callable[[S3Store, Path], object]] = {
    "get": lambda store, _: bytes(store.get("x")) == DATA or pytest.fail("wrong bytes"),
    "range": lambda store, _: store_kit.read_range(store, "x", 5, 100) == DATA[5:105] or pytest.fail("wrong bytes"),
    "read_into": lambda store, _: read_into(store) == DATA[7:] or pytest.fail("wrong bytes"),
    "head": lambda store, _: store.head("x").nbytes == len(DATA) or pytest.fail("wrong length"),
    "list": lambda store, _: [each.key for each in store.list_objects()] == ["x"] or pytest.fail("wrong listing"),
    "put": lambda store, _: written(store, lambda: store.put("new", DATA)),
    "put_file": lambda store, path: written(store, lambda: store.put_file("new", path)),
    "delete": lambda store, _: store.delete(["nothing"]),
}


def set_retry_policy(store: S3Store, operation: str) -> None:
    """Sets as many retries as botocore needs: a closed connection that is noticed only on reuse costs one, too."""
    if not operation.startswith(("get", "read", "head")):
        store.retry_policy = dataclasses.replace(store.retry_policy, retries=6)


def read_into(store: S3Store) -> bytes:
    out = bytearray(len(DATA) - 7)
    store.read_into("x", out, offset=7)
    return bytes(out)


def written(store: S3Store, write: Callable[[], object]) -> None:
    write()
    assert bytes(store.get("new")) == DATA


@pytest.fixture
def store(server: store_kit.Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[S3Store]:
    """Returns a folder that holds DATA as "x", through the proxy; it is read and written in parts, and retries do not wait."""
    monkeypatch.setattr(web_reader, "_PART_NBYTES", 90_000)
    monkeypatch.setattr(web_reader, "_PROGRESS_NBYTES", 30_000)
    monkeypatch.setattr(s3_store, "_PART_NBYTES", 100_000)
    folder = uuid.uuid4().hex
    server.store("tests", folder).put("x", DATA)
    proxy.script()
    made = server.client(proxy.url, retries=3, stall_s=60).store("tests", folder)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns a file that holds DATA."""
    made = tmp_path / "data"
    made.write_bytes(DATA)
    return made


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_temporary_failure_is_retried(
    store: S3Store, proxy: FaultProxy, path: Path, operation: str, fault: Fault, pauses: list[float]
) -> None:
    set_retry_policy(store, operation)
    proxy.script(None, fault, None, fault)  # the first request and a later one, which differ
    OPERATIONS[operation](store, path)
    proxy.script()
    store.delete(["new"])
    proxy.script(fault, fault, fault)
    OPERATIONS[operation](store, path)
    assert pauses or isinstance(fault, Length | Truncate | Reset)  # a short answer or none may not be noticed


@pytest.mark.parametrize("fault", [Stall(0), Stall(100), Stall(20_000), Trickle(0.05)], ids=repr)
def test_stalled_answer_is_abandoned(
    store: S3Store, proxy: FaultProxy, path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pauses = 0

    def wait(pause_s: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        store._transport.stall_s = 60  # on a busy machine other answers may take 0.2 s

    monkeypatch.setattr(retry, "_wait", wait)
    store.parallel, store._transport.stall_s = 1, 0.2
    proxy.script(fault)
    OPERATIONS["read_into"](store, path)
    assert num_pauses == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Status(503, SLOW_DOWN), r"the server says 503 SlowDown \(less, please\)"),
        (Reset(), "no answer from http://127.0.0.1:"),
        (Truncate(), "ended after 0 of"),
        (Garbage(), "no answer from .*BadStatusLine"),
        (Header("Content-Range", "bytes 0-9/300000"), "bytes 0 to 10 came, where 0 to 10,000 were asked for"),
        (Header("Content-Range", "bytes 1-10000/300000"), "bytes 1 to 10,001 came, where 0 to 10,000"),
        (Header("Content-Range", "rubbish"), "did not say which range it contains: 'rubbish'"),
        (Length(+1), "announced 10,001 bytes for a range of 10,000"),
        (Length(-1), "announced 9,999 bytes for a range of 10,000"),
    ],
)
def test_lasting_failure_is_one_error(store: S3Store, proxy: FaultProxy, pauses: list[float], fault: Fault, said: str) -> None:
    proxy.script(*[fault] * 4, None)
    with pytest.raises(
        StoreError, match=f"cannot read bytes 0 to 10,000 of s3://tests/.*/x: .*{said}.*; failed 4 times in .* more retries"
    ):
        store_kit.read_range(store, "x", 0, 10_000)
    assert proxy.num_requests == 4
    assert len(pauses) == 3
    assert all(0.05 * 2**i <= pause <= 0.1 * 2**i for i, pause in enumerate(pauses))


@pytest.mark.parametrize("operation", ["put", "put_file", "list", "delete"])
def test_botocore_does_not_retry_by_itself(store: S3Store, proxy: FaultProxy, path: Path, operation: str) -> None:
    proxy.script(*[Status(503, SLOW_DOWN)] * 9)
    with pytest.raises(StoreError, match=r"the server says 503 SlowDown \(less, please\); failed 4 times"):
        OPERATIONS[operation](store, path)
    assert proxy.num_requests == 4


def test_no_try_begins_after_the_time_limit_without_progress(
    server: store_kit.Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def wait(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    monkeypatch.setattr(retry, "_wait", wait)
    monkeypatch.setattr(retry, "monotonic", lambda: now_s)
    store = server.client(proxy.url, retries=1000, timeout_s=60).store("tests")
    proxy.script(*[Status(500)] * 1000)
    with pytest.raises(
        StoreError,
        match=r"the server says 500 \(Internal Server Error\); no progress in \d+\.\d s \(\d+ tries\), with timeout_s=60",
    ):
        store.head("x")
    assert 50 <= now_s <= 60
    assert 8 <= proxy.num_requests <= 20


def test_retry_after_is_respected(store: S3Store, proxy: FaultProxy, pauses: list[float]) -> None:
    proxy.script(Status(503, headers=(("Retry-After", "7"),)), Status(503, headers=(("Retry-After", "tomorrow"),)))
    store.head("x")
    assert pauses[0] == 7.0
    assert pauses[1] < 1


def test_bytes_received_before_a_fault_are_not_read_again(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    proxy.script(*[Truncate(40_000)] * 6)  # more than the retries, but each makes progress
    out = bytearray(200_000)
    store._fill("x", 0, MemoryTarget(memoryview(out)), web_reader.Version("x", None))
    assert DATA[:200_000] == out
    assert 5 <= proxy.num_requests <= 6


def test_parts_of_two_versions_are_never_combined(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    proxy.script(None, Header("ETag", '"another"'))
    with pytest.raises(StoreError, match=r"s3://tests/.*/x has changed: version \S+ was being read, but it is now \S+\. Read"):
        OPERATIONS["read_into"](store, path)


def test_object_that_changes_between_two_tries_is_an_error(
    server: store_kit.Server, store: S3Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause(_: float) -> None:
        server.store("tests", store.prefix).put("x", DATA[::-1])

    proxy.script(Truncate(40_000))
    monkeypatch.setattr("shmload.storage.retry._wait", pause)
    with pytest.raises(StoreError, match="has changed"):
        read_into(store)
    proxy.script(Truncate(40_000))
    assert bytes(store.get("x")) == DATA[::-1]


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", StoreError, "lack permission: ask the bucket's owner to grant it"),
        (403, b"", StoreError, r"403 \(Forbidden\); the server refuses these credentials: check access_key"),
        (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", StoreError, "this machine's clock is wrong: set it"),
        (401, b"<html>", StoreError, r"401 \(Unauthorized\); the server refuses these credentials"),
        (400, b"<Error><Code>ExpiredToken</Code></Error>", StoreError, "have expired: make a client with new ones"),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", StoreError, "or create the bucket"),
        (404, b"<Error><Code>NoSuchKey</Code></Error>", ObjectMissing, "no such object: s3://tests/.*/x at http"),
        (405, b"", StoreError, r"405 \(Method Not Allowed\); check the endpoint, the bucket's name and what the server supports"),
        (501, b"<Error><Code>NotImplemented</Code></Error>", StoreError, "501 NotImplemented; check the endpoint"),
        (
            400,
            b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>is wrong; expecting 'eu-west-3'</Message></Error>",
            StoreError,
            r"to region '[\w-]+'; the client needs region='eu-west-3'",
        ),
        (307, b"", StoreError, "the client needs another endpoint than http://127.0.0.1:.*, or another region"),
    ],
)
@pytest.mark.parametrize("operation", ["get", "range", "head", "put", "put_file"])
def test_permanent_failure_is_an_error_at_once(
    store: S3Store,
    proxy: FaultProxy,
    path: Path,
    pauses: list[float],
    operation: str,
    status: int,
    body: bytes,
    error: type[Exception],
    said: str,
) -> None:
    proxy.script(*[Status(status, body)] * 9)
    key_is_written = operation.startswith("put")
    with pytest.raises(error, match=said.replace("/x at", "/new at") if key_is_written else said):
        OPERATIONS[operation](store, path)
    assert pauses == []


def test_error_of_a_redirect_names_the_region_to_use(store: S3Store, proxy: FaultProxy) -> None:
    proxy.script(Status(301, headers=(("x-amz-bucket-region", "eu-north-1"), ("Location", "http://elsewhere/"))))
    with pytest.raises(
        StoreError, match=r"the server says 301 \(Moved Permanently\) to region '[\w-]+'; the client needs region='eu-north-1'"
    ):
        store.get("x")


def test_reused_connection_that_breaks_is_not_a_failure(store: S3Store, proxy: FaultProxy, pauses: list[float]) -> None:
    store.head("x")
    proxy.script(Refuse())
    assert bytes(store.get("x")) == DATA
    assert pauses == []


def test_upload_succeeds_if_only_the_answer_to_its_completion_is_lost(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    proxy.script(*[None] * 4, Reset())  # begin, three parts, complete
    assert len(DATA) == store.put_file("new", path).nbytes
    assert bytes(store.get("new")) == DATA
    assert sum("?uploadId" in target and method == "POST" for method, target in proxy.requests) == 2


def test_lost_upload_is_not_confused_with_an_earlier_object(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    store.put("new", DATA[::-1])  # of the same length
    gone = b"<Error><Code>NoSuchUpload</Code><Message>aborted by a rule of the bucket</Message></Error>"
    proxy.script(*[None] * 4, Status(404, gone))  # begin, three parts, complete
    with pytest.raises(StoreError):
        store.put_file("new", path)
    assert bytes(store.get("new")) == DATA[::-1]


def test_upload_that_became_a_different_object_is_an_error(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    other = Status(206, b"x", (("Content-Range", "bytes 0-0/7"), ("ETag", '"1"')))
    proxy.script(*[None] * 5, other)  # begin, three parts, complete, and the object that exists then
    with pytest.raises(StoreError, match=rf"new has 7 bytes, not the {len(DATA):,} that were sent: another program writes there"):
        store.put_file("new", path)


def test_failed_upload_leaves_no_parts(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    store.parallel = 1
    proxy.script(None, None, Status(403), Status(500))  # begin, the first part, the second, the abort
    with pytest.raises(StoreError, match=r"cannot write s3://tests/.*/new at .*: the server says 403"):
        store.put_file("new", path)
    assert proxy.requests[-1][0] == "DELETE"
    assert "Uploads" not in store.call("list_multipart_uploads", "list parts", Prefix=store.prefix)
    with pytest.raises(ObjectMissing):
        store.head("new")


def test_file_that_shrinks_during_its_upload_is_an_error(store: S3Store, path: Path) -> None:
    with (
        open(path, "rb") as file,
        pytest.raises(StoreError, match=r"became shorter while it was sent\. Finish files before sending them"),
    ):
        store._put_parts("new", file.fileno(), len(DATA) + 1)


def test_error_in_a_200_answer_to_a_completion_is_an_error(store: S3Store, proxy: FaultProxy, path: Path) -> None:
    proxy.script(*[None] * 4, Status(200, b"<Error><Code>InternalError</Code><Message>later</Message></Error>"))
    assert len(DATA) == store.put_file("new", path).nbytes
    assert bytes(store.get("new")) == DATA


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>welcome</html>", r"the server's answer is not a listing: it lacks IsTruncated"),
        (b"<ListBucketResult><Contents>", r"the server says 500 \(Internal Server Error\)"),
        (
            b"<ListBucketResult><Contents><Key>y</Key></Contents></ListBucketResult>",
            r"the server's answer is not a listing: it lacks IsTruncated",
        ),
        (
            b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
            r"the server's answer is not a listing: it lacks NextContinuationToken",
        ),
        (
            b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>else/where</Key><Size>1</Size><ETag>e</ETag></Contents>"
            b"</ListBucketResult>",
            r"the server sent another listing: some of its keys are not below '[0-9a-f]+/'",
        ),
    ],
)
def test_invalid_listing_is_an_error(store: S3Store, proxy: FaultProxy, body: bytes, said: str) -> None:
    proxy.script(*[Status(200, body)] * 4)
    with pytest.raises(StoreError, match=f"cannot list s3://tests/.*: {said}.*; failed 4 times"):
        store.list_objects()


def test_server_that_repeats_a_page_is_an_error(store: S3Store, proxy: FaultProxy) -> None:
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    proxy.script(*[Status(200, page)] * 3)
    with pytest.raises(StoreError, match="returns the same page repeatedly"):
        store.list_objects()


def test_refused_deletion_is_an_error(store: S3Store, proxy: FaultProxy) -> None:
    proxy.script(Status(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"))
    with pytest.raises(StoreError, match=r"cannot delete s3://tests/.*/x at .*: the server says 403 AccessDenied \(no\)"):
        store.delete(["x"])


def test_server_without_versions_is_refused(store: S3Store, proxy: FaultProxy) -> None:
    proxy.script(Header("ETag", ""))
    assert store.head("x").etag.startswith("time:")
    proxy.script(Status(200, DATA))
    with pytest.raises(StoreError, match="does not report versions: it must send ETag or Last-Modified"):
        store.get("x")


def test_short_server_outage_is_waited_out(server: store_kit.Server, tmp_path: Path, pauses: list[float]) -> None:
    from shmload.storage.http_store import HttpStore
    from shmload.storage.retry import RetryPolicy

    with store_kit.web_server(tmp_path) as url:
        (tmp_path / "x").write_bytes(b"x")
        store = HttpStore(url, retry_policy=RetryPolicy(retries=2))
        store.head("x")
        store.close()
    with pytest.raises(StoreError, match=r"no answer from .*ConnectionRefusedError.*; failed 3 times"):
        store.head("x")
    assert len(pauses) == 2
    with pytest.raises(StoreError, match=r"nothing listens at .*: check host and port, or start the server"):
        HttpStore(url).head("x")


NUM_EXAMPLES = int(os.environ.get("SHMLOAD_FAULT_EXAMPLES", "40"))
FAULTS: st.SearchStrategy[Fault | None] = st.one_of(
    st.sampled_from([Refuse(), Garbage(), Status(500), Status(503, SLOW_DOWN)]),
    st.builds(Reset, st.integers(0, 100_000)),
    st.builds(Truncate, st.integers(0, 100_000)),
    st.builds(Length, st.sampled_from([-70_000, -1, 1, 70_000])),
)


@slow
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    operation=st.sampled_from(list(OPERATIONS)),
    script=st.lists(st.one_of(st.none(), FAULTS, st.just(Header("ETag", '"another"'))), max_size=12),
)
def test_any_failure_gives_correct_bytes_or_an_error(
    store: S3Store, proxy: FaultProxy, path: Path, operation: str, script: list[Any]
) -> None:
    proxy.script()
    store.delete(["new"])
    proxy.script(*script)
    try:
        OPERATIONS[operation](store, path)
    except StoreError:
        assert any(script)


@slow
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    operation=st.sampled_from(["get", "range", "read_into", "head", "list", "put_file", "put"]),
    script=st.lists(st.lists(FAULTS, max_size=3), max_size=4),
)
def test_up_to_as_many_consecutive_faults_as_retries_are_tolerated(
    store: S3Store, proxy: FaultProxy, path: Path, operation: str, script: list[list[Any]]
) -> None:
    store.parallel = 1  # otherwise consecutive faults belong to several ranges
    set_retry_policy(store, operation)
    proxy.script()
    store.delete(["new"])
    proxy.script(*[fault for few in script for fault in [*few, None]])
    OPERATIONS[operation](store, path)


@pytest.mark.parametrize("fault", [Stall(0), Stall(100)], ids=repr)
def test_failed_listing_is_retried(
    store: S3Store, proxy: FaultProxy, path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.retry_policy.timeout_s == 60
    patient, num_pauses = store.client, 0

    def wait(pause_s: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        store.client = patient  # on a busy machine the second answer may take 0.2 s

    monkeypatch.setattr(retry, "_wait", wait)
    store.client = dataclasses.replace(patient, retry_policy=dataclasses.replace(patient.retry_policy, stall_s=0.2))
    proxy.script(fault)
    OPERATIONS["list"](store, path)
    assert (proxy.num_requests, num_pauses) == (2, 1)


class WaitingPart:
    """A part of a transfer that waits between tries while another part fails, and continues when the transfer is given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tries = 0
        self.pauses = threading.Event()
        self._is_over = threading.Event()
        shutdown = ThreadPoolExecutor.shutdown

        def ended(pool: ThreadPoolExecutor, *arguments: Any, **named: Any) -> None:
            self._is_over.set()
            shutdown(pool, *arguments, **named)

        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", ended)
        monkeypatch.setattr(retry, "_wait", self._wait)

    def try_once(self) -> None:
        self.num_tries += 1
        raise retry.TransientError("not now")

    def _wait(self, pause_s: float) -> None:
        self.pauses.set()
        assert self._is_over.wait(20), "the transfer was not given up"


@pytest.mark.parametrize("error", [StoreError("no room there"), KeyboardInterrupt("Ctrl-C")], ids=repr)
def test_other_parts_are_not_retried_after_a_part_fails(monkeypatch: pytest.MonkeyPatch, path: Path, error: BaseException) -> None:
    monkeypatch.setattr(s3_store, "_PART_NBYTES", 150_000)
    waiting, asked = WaitingPart(monkeypatch), []

    def call(operation: str, *_: Any, **named: Any) -> Any:
        asked.append(operation)
        if named.get("PartNumber") == 1:
            waiting.try_once()
        if named.get("PartNumber") == 2:
            assert waiting.pauses.wait(20)
            raise error
        return {"UploadId": "1"}

    store = make_client("http://127.0.0.1:1", "key", "secret").store("tests")
    monkeypatch.setattr(store, "call", call)
    with pytest.raises(type(error), match=str(error)):
        store.put_file("new", path)
    assert waiting.num_tries == 1
    assert asked[-1] == "abort_multipart_upload"


def test_other_ranges_are_not_retried_after_a_range_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_reader, "_PART_NBYTES", 100)
    waiting = WaitingPart(monkeypatch)

    def ask(method: str, key: str, headers: Any) -> Any:
        if headers["Range"] == "bytes=0-99":
            waiting.try_once()
        assert waiting.pauses.wait(20)
        raise StoreError("no right to read")

    store = HttpStore("http://127.0.0.1:1", parallel=2)
    monkeypatch.setattr(store, "ask", ask)
    with pytest.raises(StoreError, match="no right to read"):
        store.read_into("x", bytearray(200))
    assert waiting.num_tries == 1
