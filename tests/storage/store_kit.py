"""Servers for tests: a Ceph gateway (or moto), rclone, a plain web server and others. Each is started once and ends with the
process.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, unquote

from shmload.remote import Client, make_client
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.s3_store import S3Store
from shmload.storage.store import Store
from tests.free_ports import free_port

# gcsfs reads this when it is imported; otherwise it asks by gRPC for the kind of each bucket, which no emulator answers, and
# waits a minute
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
ACCESS_KEY, SECRET_KEY = "AKIDSHMLOADTEST", "SECRETwJalrXUtnFEMI/K7MDENG+bPx"
_HERE = Path(__file__).parent
_PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-authtool")
_DEADLINE_S = 200.0


@dataclass(frozen=True)
class Server:
    """A running S3-compatible server."""

    name: str
    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = "default"

    def client(self, endpoint: str | None = None, **options: Any) -> Client:
        """Returns a client of the server, or of a proxy in front of it."""
        given = {"region": self.region, **options}
        return make_client(endpoint or self.endpoint, self.access_key, self.secret_key, **given)

    def bucket(self, name: str) -> str:
        """Creates a bucket and returns its name."""
        self.client().store(name).call("create_bucket", f"make {name}", but=(409,))
        return name

    def store(self, bucket: str, folder: str = "", **options: Any) -> S3Store:
        return self.client(**options).store(bucket, folder)


def missing_of_ceph() -> list[str]:
    """Returns the programs that the Ceph gateway needs and that are not installed."""
    return [name for name in _PACKAGES if shutil.which(name) is None]


def s3_server() -> Server:
    """Returns the default server: Ceph's gateway, or moto if that is not installed.


    Raises:
        LookupError: neither is installed; the message says what is needed.
    """
    if not missing_of_ceph():
        return ceph()
    if importlib.util.find_spec("flask") and importlib.util.find_spec("moto"):
        return moto()
    raise LookupError("needs radosgw, ceph-mon, ceph-osd and ceph-common, or moto[server]")


@functools.cache
def ceph() -> Server:
    """Starts a Ceph gateway, which checks signatures and has versions, multipart uploads, pages and conditions as Amazon's S3."""
    folder = tempfile.mkdtemp(prefix="shmload-ceph-", dir="/tmp")
    script = str(_HERE / "start_ceph.sh")
    reading, writing = os.pipe()  # the guard stops the daemons when this process ends for any reason
    subprocess.run(["setsid", "-f", "bash", script, "guard", folder], stdin=reading, check=True)
    os.close(reading)
    atexit.register(_stop_ceph, script, folder, writing, os.getpid())
    port = free_port(3)
    done = subprocess.run(["bash", script, folder, str(port), ACCESS_KEY, SECRET_KEY], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    _until_open(port)
    return Server("ceph", f"http://127.0.0.1:{port}")


def _stop_ceph(script: str, folder: str, writing: int, pid: int) -> None:
    if os.getpid() == pid:
        subprocess.run(["bash", script, "stop", folder], check=True)
        os.close(writing)


@functools.cache
def moto() -> Server:
    """Starts moto, which answers everything and checks no signatures."""
    port = free_port()
    _spawn(["env", "S3_UPLOAD_PART_MIN_SIZE=256", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    return Server("moto", f"http://127.0.0.1:{port}", region="us-east-1")


@functools.cache
def rclone() -> Server:
    """Starts rclone's server, which answers ranges with status 200 and ignores conditions."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="shmload-rclone-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [rclone_program() or "rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"]
    _spawn([*command, "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", folder], port)
    return Server("rclone", f"http://127.0.0.1:{port}")


def rclone_program() -> str | None:
    """Returns the path of rclone, if it is installed."""
    beside = Path(sys.executable).parent / "rclone"
    return str(beside) if beside.exists() else shutil.which("rclone")


# The emulator's public default key.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@functools.cache
def gcs_endpoint() -> str:
    """Starts an emulator of Google Cloud Storage with a bucket `tests`."""
    port = free_port()
    # the emulator's own server handles one connection at a time
    program = (
        "from http import server; server.HTTPServer = server.ThreadingHTTPServer; server.HTTPServer.request_queue_size = 64; "
        "from gcp_storage_emulator.__main__ import main; main()"
    )
    options = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=tests"]
    _spawn([sys.executable, "-c", program, *options], port)
    return f"http://127.0.0.1:{port}"


@functools.cache
def azure_endpoint() -> str:
    """Starts Microsoft's emulator of Azure Blob Storage with a container `tests`.


    Raises:
        LookupError: it is not installed.
    """
    program = shutil.which(os.environ.get("SHMLOAD_AZURITE") or "azurite-blob")
    if program is None:
        raise LookupError("needs azurite-blob (npm install azurite), or its path in SHMLOAD_AZURITE")
    port = free_port()
    place = ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    # the emulator would refuse the newer protocol version of the client
    _spawn([program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", *place], port)
    endpoint = f"http://127.0.0.1:{port}"
    FilesystemStore("az://tests", azure_options(endpoint))._opened().mkdir("tests")
    return endpoint


def azure_options(endpoint: str, key: str = AZURITE_KEY) -> dict[str, Any]:
    """Returns the options with which az:// reaches the emulator."""
    at = f"BlobEndpoint={endpoint}/devstoreaccount1"
    return {"connection_string": f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};{at};"}


@functools.cache
def sftp_port() -> int:
    """Starts an SFTP server over an empty folder and returns its port."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="shmload-sftp-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _spawn([sys.executable, str(_HERE / "sftp_server.py"), str(port), folder, SECRET_KEY], port)
    return port


OTHERS = ("gs", "az", "sftp")  # schemes of stores that fsspec reaches and that have a server for tests here


def new_folder_url(scheme: str, through: Callable[[str], str] = str) -> tuple[str, dict[str, Any]]:
    """Returns the URL of a new folder in such a store, and the options of its library.


    Args:
        scheme: one of OTHERS.
        through: maps the endpoint to that of a proxy in front of it.
    Raises:
        LookupError: its server is not installed.
    """
    folder = f"tests/folder {os.urandom(6).hex()}"
    if scheme == "gs":
        return f"gs://{folder}", {"endpoint_url": through(gcs_endpoint()), "token": "anon"}
    if scheme == "az":
        return f"az://{folder}", azure_options(through(azure_endpoint()))
    login = {"username": "tests", "password": SECRET_KEY, "look_for_keys": False, "allow_agent": False}
    return f"sftp://127.0.0.1:{sftp_port()}/{folder}", login


def _spawn(command: list[str], port: int) -> None:
    """Starts a server that ends with this process, through a shell, so that it is not a child of the tests."""
    reading, writing = os.pipe()
    script = '"$@" </dev/null & pid=$!; cat >/dev/null; kill $pid'
    subprocess.run(
        ["setsid", "-f", "bash", "-c", script, "server", *command],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    os.close(reading)
    _KEPT.append(writing)
    _until_open(port)


_KEPT: list[int] = []  # descriptors that are closed when this process ends


def _until_open(port: int) -> None:
    deadline = monotonic() + _DEADLINE_S
    while monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            threading.Event().wait(0.02)
    raise AssertionError(f"nothing listens at port {port}")


class _Files(http.server.BaseHTTPRequestHandler):
    """Serves a folder by GET and HEAD, with ranges and versions as web servers have them."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, *, with_body: bool) -> None:
        server: Any = self.server
        path = server.root / unquote(self.path.split("?")[0]).lstrip("/")
        if not path.is_file():
            self._send(404, b"not here", {}, with_body)
            return
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = server.headers_of(etag)
        if self.headers.get("If-Match", etag) != etag:
            self._send(412, b"", headers, with_body)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
        if match is None:
            self._send(200, data, headers, with_body)
            return
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if first >= len(data):
            self._send(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"}, with_body)
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def etag_only(etag: str) -> dict[str, str]:
    """Returns headers that contain only the ETag."""
    return {"ETag": etag}


@contextmanager
def served(server: socketserver.BaseServer) -> Iterator[None]:
    """Runs a server in its own thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def web_server(
    root: Path,
    *,
    ranges: bool = True,
    headers_of: Callable[[str], dict[str, str]] = etag_only,
    context: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Runs a web server over a folder and yields its URL."""
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # ignores clients that disconnect
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.root, server.ranges, server.headers_of = root, ranges, headers_of
    with served(server):
        yield f"http://127.0.0.1:{server.server_port}"


class _Hub(_Files):
    """Answers as Hugging Face's hub for one dataset, `team/photos`; objects are at other addresses, which expire."""

    def _serve(self, *, with_body: bool) -> None:
        server: Any = self.server
        path = unquote(self.path.split("?")[0])
        about = re.fullmatch(r"/api/datasets/team/photos(?:/(revision|tree)/([^/]+))?(/.*)?", path)
        at = re.fullmatch(r"/datasets/team/photos/resolve/([^/]+)/(.*)", path)
        if at is not None and server.commit(at[1]) and (server.root / server.commit(at[1]) / at[2]).is_file():
            there = quote(f"/elsewhere/{server.commit(at[1])}/{at[2]}")
            self._send(302, b"", {"Location": f"{there}?signature=x", "X-Repo-Commit": server.commit(at[1])}, with_body)
        elif path.startswith("/elsewhere/"):
            self.path = quote(path.removeprefix("/elsewhere"))
            super()._serve(with_body=with_body)
        elif about is not None and (sha := server.commit(about[2] or "main")):
            if about[1] == "tree":
                found = server.tree(sha, (about[3] or "").strip("/"), "recursive=true" in self.path.lower())
                self._json(found, with_body) if found is not None else self._send(
                    404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body
                )
            else:
                self._json(
                    {"id": "team/photos", "sha": sha, "private": False, "tags": [], "siblings": [], "downloads": 0}, with_body
                )
        else:
            code = "RevisionNotFound" if about or at else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": code}, with_body)

    def _json(self, found: Any, with_body: bool) -> None:
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, with_body)


class _HubServer(http.server.ThreadingHTTPServer):
    """Serves the folders of `root` as commits; `main` names the newest one."""

    root: Path
    main: str

    def commit(self, revision: str) -> str:
        sha = self.main if revision == "main" else revision
        return sha if (self.root / sha).is_dir() else ""

    def tree(self, sha: str, folder: str, is_deep: bool) -> list[dict[str, Any]] | None:
        place = self.root / sha / folder
        if not place.is_dir():
            return None
        paths = sorted(place.rglob("*") if is_deep else place.iterdir())
        return [self._entry(path, str(path.relative_to(self.root / sha))) for path in paths]

    @staticmethod
    def _entry(path: Path, name: str) -> dict[str, Any]:
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": hashlib.sha1(path.read_bytes()).hexdigest(), "size": path.stat().st_size}


@contextmanager
def hub_server(root: Path) -> Iterator[_HubServer]:
    """Runs a hub with the dataset `team/photos`: each folder of `root` is a commit; set `main` to the newest one's name."""
    server = _HubServer(("127.0.0.1", 0), _Hub)
    made: Any = server
    server.daemon_threads = True
    made.handle_error = lambda *_: None  # ignores clients that disconnect
    server.root, made.ranges, made.headers_of = root, True, etag_only
    with served(server):
        yield server


def read_range(store: Store, key: str, offset: int, nbytes: int, etag: str | None = None) -> bytes:
    """Returns a range of an object's bytes."""
    out = bytearray(nbytes)
    store.read_into(key, out, offset=offset, etag=etag)
    return bytes(out)
