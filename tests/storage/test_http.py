"""Plain web servers: redirects, weak versions, refusals."""

from __future__ import annotations

import http.server
import random
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, StoreError
from shmload.storage.http import HttpStore, MemoryTarget, Version
from shmload.storage.transport import Answer, RetryPolicy, Transport
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, Status, fault_proxy

DATA = random.Random(1).randbytes(50_000)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    """A proxy before a server that has "x"."""
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
def test_a_redirect_is_followed(store: HttpStore, proxy: FaultProxy, status: int) -> None:
    proxy.script(moved("/x?token=1", status), moved(f"{proxy.url}/x", status))
    assert bytes(store.get("elsewhere")) == b"0123456789"
    assert [target for _, target in proxy.requests] == ["/elsewhere", "/x?token=1", "/x"]


def test_a_redirect_in_circles_or_to_nowhere_is_an_error(store: HttpStore, proxy: FaultProxy) -> None:
    proxy.script(*[moved("/x")] * 6)
    with pytest.raises(StoreError, match=r"/x leads elsewhere more than 5 times: give the URL of its end"):
        store.get("x")
    proxy.script(moved("ftp://host/x"))
    with pytest.raises(StoreError, match=r"/x leads elsewhere, to what is no https: URL: give the right URL"):
        store.get("x")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "401 X; it wants to know who asks: use s3:// with credentials"),
        (403, "403 X; it wants to know who asks"),
        (400, "400 X; look at the URL"),
        (501, "501 X; look at the URL"),
    ],
)
def test_a_refusal_is_an_error_at_once(store: HttpStore, proxy: FaultProxy, status: int, said: str) -> None:
    proxy.script(*[Status(status)] * 2)
    with pytest.raises(StoreError, match=f"cannot read http://.*/x: the server says {said}"):
        store.get("x")
    assert proxy.num_requests == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_pass_is_asked_again(store: HttpStore, proxy: FaultProxy, pauses: list[float], status: int) -> None:
    proxy.script(Status(status))
    assert bytes(store.get("x")) == b"0123456789"
    assert (proxy.num_requests, len(pauses)) == (2, 1)


@pytest.mark.parametrize("status", [404, 410])
def test_an_object_that_is_gone_is_missing(store: HttpStore, proxy: FaultProxy, status: int) -> None:
    proxy.script(Status(status))
    with pytest.raises(ObjectMissing, match=r"no such object: http://.*/x"):
        store.get("x")


@pytest.mark.parametrize(
    "headers", [{"ETag": 'W/"weak"'}, {"Last-Modified": "Sun, 22 Nov 2026 01:02:07 GMT"}], ids=["weak", "by time"]
)
def test_versions_that_a_server_cannot_be_asked_for_are_compared_here(tmp_path: Path, headers: dict[str, str]) -> None:
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


class InPieces(http.server.BaseHTTPRequestHandler):
    """Answers each range of DATA in pieces, so that its body's length stands in the body."""

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


def test_an_answer_in_pieces_is_put_together_in_a_file(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), InPieces) as server, open(tmp_path / "f", "w+b") as file:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        store = HttpStore(f"http://127.0.0.1:{server.server_port}", retry_policy=RetryPolicy(retries=0))
        assert crc32c(DATA) == store.read_to_file("x", file.fileno(), len(DATA))
        store.close()
        thread.join()
        assert file.read() == DATA


def test_a_range_is_left_in_the_middle_once_another_has_failed(store: HttpStore) -> None:
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


def test_the_environment_names_a_proxy_and_hosts_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    far, _ = Transport("https://far.example", stall_s=1)._connection()
    near, _ = Transport("https://near.example", stall_s=1)._connection()
    assert (far.host, far.port, far._tunnel_host) == ("proxy", 3128, "far.example")
    assert (near.host, near.port, near._tunnel_host) == ("near.example", 443, None)


@pytest.mark.slow(reason="openssl makes a key and a certificate")
def test_a_server_with_a_certificate_of_its_own_needs_it_named(tmp_path: Path, pauses: list[float]) -> None:
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
        assert data == bytes(store.get("x"))
        assert data[5:300_000] == store_kit.read_range(store, "x", 5, 299_995)
        store.close()
    assert pauses == []
