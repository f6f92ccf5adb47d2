"""URLs of stores and of objects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmload.errors import StoreError
from shmload.remote import make_client
from shmload.storage.http_store import HttpStore
from shmload.storage.local_store import LocalStore
from shmload.storage.open_store import open_store
from shmload.storage.s3_store import S3Store
from shmload.storage.store_urls import split_url
from tests.storage import store_kit

CLIENT = make_client("http://h", "a", "s", retries=1, parallel=9)


def test_url_selects_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalStore(tmp_path / "a") == open_store("a") == open_store(tmp_path / "a") == open_store(f"file://{tmp_path}/a/")
    assert LocalStore(Path("/a b")) == open_store("file:///a%20b") == open_store("file://localhost/a b")
    assert LocalStore(tmp_path / "s3:" / "b") == open_store("./s3:/b")
    for url in ("s3://bkt/a/b", "s3://bkt/a/b/"):
        assert CLIENT.store("bkt", "a/b") == open_store(url, CLIENT)
    assert open_store("s3://bkt/a/b", CLIENT).url == "s3://bkt/a/b"
    assert "s3://bkt" == open_store("s3://bkt", CLIENT).url == open_store("s3://bkt/", CLIENT).url
    web = open_store("https://h:1/a b/c/", CLIENT)
    assert HttpStore("https://h:1/a%20b/c") == web
    assert (web.parallel, web.retry_policy.retries) == (9, 1)
    assert [repr(open_store(url, CLIENT)) for url in ("/a", "http://h", "s3://bkt")] == [
        "LocalStore(root=PosixPath('/a'))",
        "HttpStore('http://h')",
        "S3Store('s3://bkt', endpoint='http://h')",
    ]


def test_default_client_is_made_from_the_environment(server: store_kit.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", server.region)
    store = open_store("s3://tests/environment")
    assert isinstance(store, S3Store)
    store.put("x", b"x")
    assert bytes(store.get("x")) == b"x"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "an empty path does not name a store: give a folder, file://, http://, https:// or s3://bucket/folder"),
        ("nonsense://bkt", "nonsense:// is not a known kind of store: give a folder"),
        ("file://elsewhere/a", "is on another host: a file:// URL has three slashes"),
        ("s3://", "'' is not a bucket's name"),
        ("s3://key@bkt/a", "contains credentials or options: give them to make_client"),
        ("s3://bkt/a/../b", r"'a/../b' is not a valid key of s3://bkt.*Try 'b'"),
        ("http://u:p@h/a", "http://h: the URL of a store must not contain a user"),
        ("http://h/a?token=1", "must not contain a user, a password, . or #"),
    ],
)
def test_url_without_a_store_is_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        open_store(url, CLIENT)


@pytest.mark.parametrize(
    ("url", "folder", "key"),
    [
        ("s3://b/a/x.tar", "s3://b/a", "x.tar"),
        ("s3://b/x%20y", "s3://b", "x%20y"),
        ("http://h/x%20y", "http://h", "x y"),
        ("file:///a/x%20y", "file:///a", "x y"),
        ("/a/b", "/a", "b"),
        ("/b", "/", "b"),
        ("b", ".", "b"),
        ("a/b%20", "a", "b%20"),
    ],
)
def test_object_url_is_split_into_folder_and_key(url: str, folder: str, key: str) -> None:
    assert (folder, key) == split_url(url)


@pytest.mark.parametrize("url", ["s3://bkt", "s3://bkt/", "http://h", "http://h/", "/a/", "", "a/.."])
def test_url_without_an_object_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"does not name an object: the URL of an object ends in /key|is not a valid key of"):
        split_url(url)


def test_urls_need_no_optional_package() -> None:
    code = (
        "import sys\n"
        "for name in ('obstore', 'boto3', 'botocore'): sys.modules[name] = None\n"
        "import shmload.remote, shmload.storage.open_store\n"
        "store = shmload.storage.open_store.open_store('http://bkt', shmload.remote.make_client('http://h', 'a', 's'))\n"
        "print(store.url, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.stdout == "http://bkt False\n", done.stderr
