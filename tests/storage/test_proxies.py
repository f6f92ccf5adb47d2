"""Requests through the proxies that the environment names."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shmload.errors import StoreError
from shmload.storage.client import make_client
from shmload.storage.http_store import HttpStore
from shmload.storage.retry import RetryPolicy
from shmload.storage.transport import Transport
from tests.storage import store_kit
from tests.storage.forward_proxy import ForwardProxy, forward_proxy

DATA = bytes(range(256)) * 4000
WHO, IN_URL = "ann@firm:p/w:d", "ann%40firm:p%2Fw%3Ad"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x").write_bytes(DATA)
    return tmp_path


@pytest.fixture(params=[None, WHO], ids=["open", "with a password"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardProxy]:
    with forward_proxy(request.param) as made:
        before = f"{IN_URL}@" if request.param else ""
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://{before}{made.place}")
        yield made


def assert_reads(store: HttpStore, tmp_path: Path) -> None:
    """Checks every way of reading."""
    assert bytes(store.get("x")) == DATA
    assert DATA[5:300_000] == store_kit.read_range(store, "x", 5, 299_995)
    with open(tmp_path / "copy", "w+b") as file:
        store.read_to_file("x", file.fileno(), len(DATA))
        assert file.read() == DATA
    store.close()


def test_oracle_endpoint_is_requested_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, region, server = (
        "http://tenancy.compat.objectstorage.eu-frankfurt-1.oraclecloud.com",
        "eu-frankfurt-1",
        store_kit.moto(),
    )
    server.bucket("oracle")
    server.store("oracle", "folder").put("x", DATA)
    with forward_proxy() as proxy:
        parts = urlsplit(server.endpoint)
        proxy.leads_to = (str(parts.hostname), parts.port or 80)
        monkeypatch.setenv("http_proxy", f"http://{proxy.place}")
        store = make_client(endpoint, server.access_key, server.secret_key, region=region).store("oracle", "folder")
        assert bytes(store.get("x")) == DATA
        assert DATA[5:300_000] == store_kit.read_range(store, "x", 5, 299_995)
        assert [each.key for each in store.list_objects()] == ["x"]
    assert {f"{endpoint}/oracle"} == {target[: len(endpoint) + 7] for _, target, _ in proxy.requests}
    assert len(proxy.requests) >= 3
    assert all(f"/{region}/s3/aws4_request" in said for said in proxy.signatures)


def test_request_to_an_http_server_is_sent_with_its_absolute_url(folder: Path, proxy: ForwardProxy) -> None:
    with store_kit.web_server(folder) as url:
        assert_reads(HttpStore(url), folder)
    assert {("GET", f"{url}/x", proxy.wanted)} == set(proxy.requests)


class RecordingHandler(http.server.BaseHTTPRequestHandler):
    """A server that records the requests it receives."""

    def do_GET(self) -> None:
        told = str(self.headers).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def test_password_is_sent_only_to_the_proxy(proxy: ForwardProxy) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RecordingHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        transport = Transport(f"http://127.0.0.1:{server.server_port}", stall_s=5)
        with transport.request("GET", "/", {"Host": "far.example"}) as answer:
            heard = answer.text().decode().lower()
        transport.close()
        server.shutdown()
    assert "host: far.example" in heard
    assert "authorization" not in heard
    assert [proxy.wanted] == [authorization for _, _, authorization in proxy.requests]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """Returns a self-signed certificate for localhost and the server's context."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


def test_request_to_an_https_server_uses_a_tunnel(
    folder: Path, proxy: ForwardProxy, certificate: tuple[Path, ssl.SSLContext]
) -> None:
    with store_kit.web_server(folder, context=certificate[1]) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        assert_reads(HttpStore(url, ca_file=str(certificate[0])), folder)
    assert {("CONNECT", url.removeprefix("https://"), proxy.wanted)} == set(proxy.requests)


@pytest.mark.parametrize("no_proxy", ["127.0.0.1", "elsewhere,127.0.0.1", "HOST:PORT", "*"])
def test_servers_in_no_proxy_are_contacted_directly(
    folder: Path, proxy: ForwardProxy, no_proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_kit.web_server(folder) as url:
        monkeypatch.setenv("no_proxy", no_proxy.replace("HOST:PORT", url.removeprefix("http://")))
        assert_reads(HttpStore(url), folder)
        assert proxy.requests == []
        monkeypatch.setenv("no_proxy", "127.0.0.1:1")
        assert_reads(HttpStore(url), folder)
        assert proxy.requests != []


# Before Python 3.11.4, the answer of a proxy that refuses a tunnel is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("given", ["", "ann:wrong@"])
def test_missing_proxy_password_is_an_error_at_once(scheme: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with forward_proxy(WHO) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://{given}{proxy.place}")
        store = HttpStore(f"{scheme}://far.example", retry_policy=RetryPolicy(retries=3))
        with pytest.raises(StoreError, match=r"the proxy 127\.0\.0\.1:\d+ requires a name and a password for .* \(407\)") as caught:
            store.get("x")
        assert "wrong" not in str(caught.value)
        assert len(proxy.requests) == 1


def test_refusal_of_a_proxy_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with forward_proxy() as proxy:
        proxy.refuses = "403 Forbidden"
        monkeypatch.setenv("https_proxy", proxy.place)
        with pytest.raises(StoreError, match=r"the proxy 127\.0\.0\.1:\d+ rejects requests to https://far\.example \(403\)"):
            HttpStore("https://far.example", retry_policy=RetryPolicy(retries=3)).get("x")
        assert len(proxy.requests) == 1


def test_error_names_an_unreachable_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with forward_proxy() as proxy:
        place = proxy.place
    monkeypatch.setenv("http_proxy", f"http://ann:secret@{place}")
    with pytest.raises(StoreError, match=f"nothing listens at the proxy {place}"):
        HttpStore("http://far.example").get("x")
    monkeypatch.setenv("http_proxy", "socks5://ann:secret@host:1080")
    with pytest.raises(
        StoreError, match=r"http_proxy names a proxy of kind 'socks5' \(host\); only http:// proxies work"
    ) as caught:
        HttpStore("http://far.example").get("x")
    assert "secret" not in str(caught.value)
