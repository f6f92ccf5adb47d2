"""Plain web servers: redirects, weak versions, refusals, chunks and encodings."""

from __future__ import annotations

import gzip
import http.server
import random
import shutil
import ssl
import subprocess
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest

from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, StoreError
from shmload.formats import TarWriter
from shmload.remote import RemoteDataset
from shmload.storage.http_store import HttpStore
from shmload.storage.range_target import MemoryTarget
from shmload.storage.retry import RetryPolicy
from shmload.storage.transport import Answer, Transport, _context
from shmload.storage.web_reader import Version
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, Status, fault_proxy

DATA = random.Random(1).randbytes(50_000)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    """Yields a proxy in front of a server that has "x"."""
    (tmp_path / "x").write_bytes(b"0123456789")
    with store_kit.web_server(tmp_path) as url, fault_proxy(url) as made:
        yield made


@pytest.fixture
def store(proxy: FaultProxy) -> Iterator[HttpStore]:
    made = HttpStore(proxy.url, retry_policy=RetryPolicy(retries=1))
    yield made
    made.close()


def moved(to: str, status: int = 302) -> Status:
    return Status(status, headers=(("Location", to),))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_followed(store: HttpStore, proxy: FaultProxy, status: int) -> None:
    proxy.script(moved("/x?token=1", status), moved(f"{proxy.url}/x", status))
    assert bytes(store.get("elsewhere")) == b"0123456789"
    assert [target for _, target in proxy.requests] == ["/elsewhere", "/x?token=1", "/x"]


def test_circular_or_broken_redirect_is_an_error(store: HttpStore, proxy: FaultProxy) -> None:
    proxy.script(*[moved("/x")] * 6)
    with pytest.raises(StoreError, match=r"/x redirects more than 5 times: give the final URL"):
        store.get("x")
    proxy.script(moved("ftp://host/x"))
    with pytest.raises(StoreError, match=r"/x redirects to a URL that is not https: give the final URL"):
        store.get("x")


@pytest.mark.parametrize("to", ["http://127.0.0.1:9/x", "HTTP://127.0.0.1:9/x"])
def test_redirect_from_https_to_http_is_an_error(to: str) -> None:
    answer = SimpleNamespace(status=302, headers={"Location": to}, close=lambda: None)
    store = HttpStore("https://host", retry_policy=RetryPolicy(retries=0))
    store._transports["https://host"] = cast(Transport, SimpleNamespace(secure=True, request=lambda *_: answer))
    with pytest.raises(StoreError, match=r"/x redirects to a URL that is not https: give the final URL"):
        store.ask("GET", "x", {})


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "401 X; it requires authentication: use s3:// with credentials"),
        (403, "403 X; it requires authentication"),
        (400, "400 X; check the URL"),
        (501, "501 X; check the URL"),
    ],
)
def test_refusal_is_an_error_at_once(store: HttpStore, proxy: FaultProxy, status: int, said: str) -> None:
    proxy.script(*[Status(status)] * 2)
    with pytest.raises(StoreError, match=f"cannot read http://.*/x: the server says {said}"):
        store.get("x")
    assert proxy.num_requests == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_temporary_failure_is_retried(store: HttpStore, proxy: FaultProxy, pauses: list[float], status: int) -> None:
    proxy.script(Status(status))
    assert bytes(store.get("x")) == b"0123456789"
    assert (proxy.num_requests, len(pauses)) == (2, 1)


@pytest.mark.parametrize("status", [404, 410])
def test_deleted_object_raises_object_missing(store: HttpStore, proxy: FaultProxy, status: int) -> None:
    proxy.script(Status(status))
    with pytest.raises(ObjectMissing, match=r"no such object: http://.*/x"):
        store.get("x")


@pytest.mark.parametrize(
    "headers", [{"ETag": 'W/"weak"'}, {"Last-Modified": "Sun, 22 Nov 2026 01:02:07 GMT"}], ids=["weak", "by time"]
)
def test_versions_without_server_support_are_compared_by_the_client(tmp_path: Path, headers: dict[str, str]) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    said = dict(headers)
    with store_kit.web_server(tmp_path, headers_of=lambda _: dict(said)) as url:
        store = HttpStore(url)
        etag = store.head("x").etag
        assert bytes(store.get("x", etag=etag)) == b"0123456789"
        said[next(iter(said))] += " changed"
        with pytest.raises(StoreError, match=r"has changed: version"):
            store.get("x", etag=etag)
        store.close()


@pytest.mark.parametrize("read", ["whole", "range"])
def test_object_of_another_length_is_another_version_although_its_time_is_the_same(tmp_path: Path, read: str) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with store_kit.web_server(tmp_path, headers_of=lambda _: {"Last-Modified": "Sun, 22 Nov 2026 01:02:07 GMT"}) as url:
        store = HttpStore(url)
        etag = store.head("x").etag
        (tmp_path / "x").write_bytes(b"0123456789abc")
        with pytest.raises(StoreError, match=r"has changed: version .*/10 was being read, but it is now .*/13"):
            store.get("x", etag=etag) if read == "whole" else store.read_into("x", memoryview(bytearray(4)), offset=3, etag=etag)
        store.close()


@pytest.mark.parametrize("version", ["time:Sun, 22 Nov 2026 01:02:07 GMT", "time:Sun, 22 Nov 2026 01:02:07 GMT/10"])
def test_version_by_time_may_lack_the_length(tmp_path: Path, version: str) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with store_kit.web_server(tmp_path, headers_of=lambda _: {"Last-Modified": "Sun, 22 Nov 2026 01:02:07 GMT"}) as url:
        store = HttpStore(url)
        assert bytes(store.get("x", etag=version)) == b"0123456789"
        store.close()


class ChunkedHandler(http.server.BaseHTTPRequestHandler):
    """Answers each range of DATA in chunks, so that the length is part of the body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(DATA)}")
        self.send_header("ETag", '"1"')
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = [body[: len(body) // 3], body[len(body) // 3 :], b""]
        self.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))

    def log_message(self, *_: object) -> None:
        pass


def test_chunked_answer_is_assembled_in_a_file(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), ChunkedHandler) as server, open(tmp_path / "f", "w+b") as file:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        store = HttpStore(f"http://127.0.0.1:{server.server_port}", retry_policy=RetryPolicy(retries=0))
        assert crc32c(DATA) == store.read_to_file("x", file.fileno(), len(DATA))
        store.close()
        thread.join()
        assert file.read() == DATA


def test_range_is_abandoned_once_another_has_failed(store: HttpStore) -> None:
    version, blocks = Version(store.url_of("x"), None), []

    class Slow(MemoryTarget):
        def receive(self, answer: Answer) -> Iterator[None]:
            for number in range(10):
                blocks.append(number)
                if number == 3:
                    version.given_up.set()
                yield

    store._fill("x", 0, Slow(memoryview(bytearray(10))), version)
    assert blocks == [0, 1, 2, 3]


def test_proxy_and_exceptions_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    far, _ = Transport("https://far.example", stall_s=1)._connection()
    near, _ = Transport("https://near.example", stall_s=1)._connection()
    assert (far.host, far.port, far._tunnel_host) == ("proxy", 3128, "far.example")
    assert (near.host, near.port, near._tunnel_host) == ("near.example", 443, None)


@pytest.mark.slow(reason="openssl makes a key and a certificate")
def test_self_signed_certificate_must_be_given(tmp_path: Path, pauses: list[float]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    data = bytes(range(256)) * 4000
    (tmp_path / "x").write_bytes(data)
    with store_kit.web_server(tmp_path, context=context) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(StoreError, match=r"is not trusted: self.signed certificate. Give its certificates as ca_file"):
            HttpStore(url).get("x")
        store = HttpStore(url, ca_file=str(certificate))
        assert len(_context(store.ca_file).get_ca_certs()) == 1  # the system's are not trusted then, as by botocore
        assert data == bytes(store.get("x"))
        assert data[5:300_000] == store_kit.read_range(store, "x", 5, 299_995)
        store.close()
    assert pauses == []


class _Chunked(http.server.BaseHTTPRequestHandler):
    """Answers with chunks, which have extensions and are followed by trailers. The first `cut` answers stop halfway."""

    protocol_version = "HTTP/1.1"
    cut = 0
    requests: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.requests.append(self.path)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = DATA[first : last + 1]
        self.send_response(206)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(DATA)}")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_cut, type(self).cut = self.cut > 0, max(0, self.cut - 1)
        for at in range(0, len(part), 12_345):
            chunk = part[at : at + 12_345]
            if is_cut and at:
                self.wfile.write(b"%x\r\n" % len(chunk) + chunk[:100])
                self.close_connection = True
                return
            self.wfile.write(b"%x;name=value\r\n" % len(chunk) + chunk + b"\r\n")
        self.wfile.write(b"0\r\nX-Trailer: 1\r\n\r\n")


@pytest.fixture
def chunked_url() -> Iterator[str]:
    _Chunked.cut, _Chunked.requests = 0, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Chunked)
    server.daemon_threads = True
    with store_kit.served(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_chunked_answers_are_read(chunked_url: str, tmp_path: Path) -> None:
    store = HttpStore(chunked_url, retry_policy=RetryPolicy(retries=0))
    assert bytes(store.get("x")) == DATA
    assert store.head("x").nbytes == len(DATA)
    out = bytearray(20_000)
    store.read_into("x", out, offset=1_000)
    assert out == DATA[1_000:21_000]
    with open(tmp_path / "x", "wb+") as file:
        assert store.read_to_file("x", file.fileno(), len(DATA)) == crc32c(DATA)
    assert (tmp_path / "x").read_bytes() == DATA
    store.close()


def test_chunked_answer_that_is_cut_short_continues_where_it_broke_off(chunked_url: str, pauses: list[float]) -> None:
    store = HttpStore(chunked_url, retry_policy=RetryPolicy(retries=1))
    _Chunked.cut = 1
    out = bytearray(len(DATA))
    store.read_into("x", out)
    assert out == DATA
    assert len(pauses) == 1
    store.close()


def test_range_that_the_server_compressed_is_refused(store: HttpStore, proxy: FaultProxy) -> None:
    proxy.script(Status(200, headers=(("Content-Encoding", "gzip"), ("ETag", '"1"'))))
    with pytest.raises(StoreError, match=r"/x came encoded as gzip, although the request forbids it: .* disable its compression"):
        store.read_into("x", bytearray(5))


ENCODED = {"gzip": gzip.compress(DATA), "deflate": zlib.compress(DATA)}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("is_range", [False, True], ids=["whole", "range"])
def test_whole_object_that_is_compressed_by_the_server_is_decoded(
    store: HttpStore, proxy: FaultProxy, encoding: str, is_range: bool
) -> None:
    body = ENCODED[encoding]
    headers = (("Content-Encoding", encoding), ("ETag", '"1"'), ("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}"))
    proxy.script(Status(206 if is_range else 200, body, headers[: 3 if is_range else 2]))
    assert bytes(store.get("x")) == DATA


def test_server_that_ignores_ranges_is_named_once(store: HttpStore, proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.script(*[Status(200, DATA, (("ETag", '"1"'),))] * 3)
    assert store_kit.read_range(store, "x", 0, 4) == DATA[:4]
    assert not caplog.messages
    for begin in (5, 7):
        assert store_kit.read_range(store, "x", begin, 4) == DATA[begin : begin + 4]
    (message,) = caplog.messages
    assert "/x: its server ignores ranges" in message


def test_object_named_as_compressed_is_not_decompressed(store: HttpStore, proxy: FaultProxy) -> None:
    proxy.script(Status(200, ENCODED["gzip"], (("Content-Encoding", "gzip"), ("ETag", '"1"'))))
    assert bytes(store.get("x.gz")) == ENCODED["gzip"]


def test_whole_object_in_an_unknown_encoding_is_refused_once(store: HttpStore, proxy: FaultProxy) -> None:
    proxy.script(Status(200, b"xyz", (("Content-Encoding", "br"), ("ETag", '"1"'))))
    with pytest.raises(StoreError, match="/x came encoded as br, although the request forbids it"):
        store.get("x")
    assert proxy.num_requests == 1


@pytest.mark.parametrize("padding", [b"", bytes(7)])
def test_every_member_of_an_encoded_body_is_decoded(store: HttpStore, proxy: FaultProxy, padding: bytes) -> None:
    body = gzip.compress(b"one,") + padding + gzip.compress(b"") + gzip.compress(b"two") + padding
    proxy.script(Status(200, body, (("Content-Encoding", "gzip"), ("ETag", '"1"'))))
    assert bytes(store.get("x")) == b"one,two"


def test_encoded_body_that_is_cut_off_is_an_error(store: HttpStore, proxy: FaultProxy, pauses: list[float]) -> None:
    body = gzip.compress(b"one") + gzip.compress(b"two")[:-9]
    proxy.script(*[Status(200, body, (("Content-Encoding", "gzip"), ("ETag", '"1"')))] * 2)
    with pytest.raises(StoreError, match=r"/x does not match its Content-Encoding \(it is cut off\)"):
        store.get("x")


def test_body_that_is_not_in_its_encoding_is_an_error(store: HttpStore, proxy: FaultProxy, pauses: list[float]) -> None:
    proxy.script(*[Status(200, b"xyz", (("Content-Encoding", "gzip"), ("ETag", '"1"')))] * 2)
    with pytest.raises(StoreError, match="/x does not match its Content-Encoding"):
        store.get("x")


class Http10Handler(http.server.BaseHTTPRequestHandler):
    """Answers as HTTP/1.0 may: all of DATA, without a length."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 01:02:07 GMT")
        self.end_headers()
        self.wfile.write(DATA * self.server.times)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("times", [0, 1, 30])
def test_whole_object_without_a_length_is_read_up_to_its_end(times: int) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Http10Handler)
    server.times = times  # type: ignore[attr-defined]
    with store_kit.served(server):
        store = HttpStore(f"http://127.0.0.1:{server.server_port}", retry_policy=RetryPolicy(retries=0))
        assert bytes(store.get("x")) == DATA * times
        with pytest.raises(StoreError, match="/x has no known length: its server must send Content-Length"):
            store.head("x")
        store.close()


def test_presigned_urls_are_read_and_their_signatures_are_never_shown(tmp_path: Path) -> None:
    for number in range(2):
        with TarWriter(tmp_path / f"a-{number}.tar") as writer:
            writer.write({"__key__": str(number), "cls": number})
    with store_kit.web_server(tmp_path) as url, fault_proxy(url) as proxy:
        dataset = RemoteDataset.from_urls([f"{proxy.url}/a-{number}.tar?Sig=sec{number}ret" for number in range(2)], shuffle=False)
        assert [sample["__key__"] for sample in dataset] == ["0", "1"]
        assert {target for _, target in proxy.requests} == {"/a-0.tar?Sig=sec0ret", "/a-1.tar?Sig=sec1ret"}
        plain = RemoteDataset.from_urls(f"{proxy.url}/a-0.tar?download=1")
        assert len(plain) == 1
        proxy.script(Status(403))
        with pytest.raises(
            StoreError, match=r"a-0\.tar: the server says 403 X; the signature in the URL's query may be .* expired"
        ):
            RemoteDataset.from_urls(f"{proxy.url}/a-0.tar?Sig=sec0ret")


def test_slash_that_a_url_escapes_is_requested_escaped(tmp_path: Path) -> None:
    """Firebase and Google Cloud's JSON API name objects of folders in this way."""
    (tmp_path / "o" / "my data").mkdir(parents=True)
    for number in range(2):
        with TarWriter(tmp_path / "o" / "my data" / f"a-{number}.tar") as writer:
            writer.write({"__key__": str(number), "cls": number})
    with store_kit.web_server(tmp_path) as url, fault_proxy(url) as proxy:
        dataset = RemoteDataset.from_urls(f"{proxy.url}/o/my%20data%2fa-{{0..1}}.tar?alt=media", shuffle=False)
        assert [sample["__key__"] for sample in dataset] == ["0", "1"]
        assert {target for _, target in proxy.requests} == {f"/o/my%20data%2Fa-{number}.tar?alt=media" for number in range(2)}


def test_one_path_with_two_queries_is_refused() -> None:
    with pytest.raises(StoreError, match=r"http://h/a\.tar was given twice with different queries") as caught:
        RemoteDataset.from_urls(["http://h/a.tar?Sig=sec1ret", "http://h/a.tar?Sig=sec2ret"])
    assert "sec" not in str(caught.value)


def test_folder_with_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match=r"http://h/folder is not a shard .* the URL of a folder has no query"):
        RemoteDataset.from_urls("http://h/folder?Sig=secret")
