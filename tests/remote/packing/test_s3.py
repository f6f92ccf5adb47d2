"""Packing into a real S3-compatible store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import pytest

from shmload.remote import Manifest, make_client, upload_cv_dataset
from shmload.remote.packing import generation
from shmload.storage.local_store import LocalStore
from tests.remote.packing.packing_kit import Grey, names_in, packed

slow = pytest.mark.slow(reason="packs into a real S3 server")


def clients(server: Any) -> dict[str, Any]:
    """Returns a client of shmload and one of boto3."""
    config = botocore.config.Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    theirs = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **keys)
    return {"ours": make_client(server.endpoint, server.access_key, server.secret_key), "boto3": theirs}


@slow
@pytest.mark.parametrize("whose", ["ours", "boto3"])
def test_documented_upload_makes_the_same_objects_as_in_a_folder(whose: str, server: Any, tmp_path: Path) -> None:
    bucket, folder = server.bucket(f"packed-{whose}"), "imagenet-val"
    client = clients(server)[whose]
    store = make_client(server.endpoint, server.access_key, server.secret_key).store(bucket, folder)
    store.put("mine.txt", b"kept")
    upload_cv_dataset(Grey(33), client=client, bucket=bucket, base_folder=folder, maxsize=1e8, maxcount=7, workers=0)
    manifest = upload_cv_dataset(Grey(60), client=client, bucket=bucket, base_folder=folder, maxsize=1e5, maxcount=10, workers=1)
    assert manifest == packed(Grey(60), LocalStore(tmp_path))
    assert sorted([*names_in(tmp_path), "mine.txt"]) == names_of(store)
    assert all((tmp_path / name).read_bytes() == bytes(store.get(name)) for name in names_in(tmp_path))
    assert manifest == Manifest.parse(store.get("manifest.json"))


@slow
def test_packing_is_resumed_after_a_store_error(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = server.bucket("packed-again")
    store = clients(server)["ours"].store(bucket, "a")
    put_file, sent = type(store).put_file, []

    def failing(self: Any, key: str, path: Path) -> Any:
        sent.append(key)
        if len(sent) == 4:
            raise ConnectionError("unplugged")
        return put_file(self, key, path)

    monkeypatch.setattr(type(store), "put_file", failing)
    with pytest.raises(ConnectionError, match=r"^unplugged$"):
        packed(Grey(60), store)
    manifest = packed(Grey(60), store)
    assert manifest == packed(Grey(60), LocalStore(tmp_path))
    assert names_in(tmp_path) == names_of(store)
    assert len(sent) <= 4 + 4  # at least two of six shards were complete when it failed


def names_of(store: Any) -> list[str]:
    """Returns the objects that a packing into a local folder has, too: all except the versions file of a bucket."""
    return sorted(found.key for found in store.list_objects() if not found.key.endswith("/versions.json"))


@slow
@pytest.mark.parametrize("is_finished", [True, False])
def test_repeated_packing_into_a_bucket_reads_no_unchanged_shard(
    is_finished: bool, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = clients(server)["ours"].store(server.bucket("packed-unread"), f"a{is_finished}")
    if is_finished:
        manifest = packed(Grey(60), store)
    else:
        with monkeypatch.context() as patched, pytest.raises(ConnectionError):
            patched.setattr(generation.Generation, "commit", unplugged)
            packed(Grey(60), store)
        manifest = None
    read: list[str] = []
    monkeypatch.setattr(generation.Generation, "_checksum", lambda self, name, nbytes: read.append(name) or "")
    again = packed(Grey(60), store)
    assert manifest in (None, again)
    assert read == []
    assert sum(key.key.endswith(".tar") for key in store.list_objects()) == len(again.shards) > 3


def unplugged(*_: Any) -> None:
    raise ConnectionError


@slow
def test_damaged_or_missing_versions_file_makes_packing_read_all_shards(server: Any) -> None:
    store = clients(server)["ours"].store(server.bucket("packed-versions"), "a")
    manifest = packed(Grey(60), store)
    name = f"{manifest.generation}/versions.json"
    for text in (b"", b"[]", b'{"x": 1}', json.dumps({shard.name: ["a", "b"] for shard in manifest.shards}).encode()):
        store.put(name, text)
        assert packed(Grey(60), store) == manifest
    store.delete([name])
    assert packed(Grey(60), store) == manifest


@slow
@pytest.mark.parametrize("suffix", ["", ".index"])
def test_object_of_equal_length_whose_bytes_are_damaged_is_uploaded_again(suffix: str, server: Any, tmp_path: Path) -> None:
    store = clients(server)["ours"].store(server.bucket("packed-damaged"), f"a{suffix}")
    manifest = packed(Grey(60), store)
    name = manifest.shards[3].name + suffix
    whole = bytes(store.get(name))
    store.put(name, bytes([*whole[:-1], whole[-1] ^ 1]))
    assert packed(Grey(60), store) == manifest
    assert bytes(store.get(name)) == whole
