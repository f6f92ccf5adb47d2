"""The manifest: exactly what is written is read back, and invalid manifests are errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt
from shmload.remote.manifest import IndexEntry, Manifest, ShardEntry
from shmload.remote.packing.shard_record import ShardRecord
from shmload.remote.shards import RemoteShard, Shards, ShardTable
from shmload.storage.local_store import LocalStore

GENERATION = "0123456789abcdef"


def entry(number: int, nbytes: int = 10240, num_samples: int = 3, generation: str = GENERATION) -> ShardEntry:
    name = f"{generation}/shard-{number:06d}.tar"
    return ShardEntry(name, nbytes, num_samples, "0000beef", IndexEntry(name + ".index", 100, "00000001"))


MANIFEST = Manifest(GENERATION, 7, 6, 20480, ("cls", "jpg"), (entry(0), entry(1)))

sizes = st.integers(1, 1 << 40)
manifests = st.builds(
    lambda generation, seed, extensions, shards: Manifest(
        generation,
        seed,
        sum(num_samples for _, num_samples in shards),
        sum(nbytes for nbytes, _ in shards),
        tuple(sorted(extensions)),
        tuple(entry(number, *each, generation=generation) for number, each in enumerate(shards)),
    ),
    st.text("0123456789abcdef", min_size=16, max_size=16),
    st.integers(0, (1 << 64) - 1),
    st.sets(st.sampled_from(["cls", "jpg", "png", "a.json", "é"])),
    st.lists(st.tuples(sizes, sizes), max_size=4),
)


@given(manifests)
def test_written_manifest_is_read_back(manifest: Manifest) -> None:
    assert manifest == Manifest.parse(manifest.dump())
    assert manifest.dump() == Manifest.parse(manifest.dump()).dump()


def test_bytes_of_version_1_are_frozen() -> None:
    told = {
        "format": "shmload-shards",
        "version": 1,
        "generation": GENERATION,
        "seed": 7,
        "num_samples": 6,
        "nbytes": 20480,
        "extensions": ["cls", "jpg"],
        "shards": [
            {
                "name": f"{GENERATION}/shard-{number:06d}.tar",
                "nbytes": 10240,
                "num_samples": 3,
                "crc32c": "0000beef",
                "index": {"name": f"{GENERATION}/shard-{number:06d}.tar.index", "nbytes": 100, "crc32c": "00000001"},
            }
            for number in range(2)
        ],
    }
    assert MANIFEST.dump() == (json.dumps(told, indent=1) + "\n").encode()


def changed(where: tuple[Any, ...], value: Any) -> bytes:
    told = json.loads(MANIFEST.dump())
    at = told
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    return json.dumps(told).encode()


WRONG = {
    ("format",): ("webdataset", "manifest.json: this is not a manifest of shards, which has format 'shmload-shards'"),
    ("version",): (2, "manifest.json: version: 1 is known here, got 2; a newer shmload may read it"),
    ("generation",): ("xyz", "manifest.json: generation: 16 hexadecimal digits are needed; got 'xyz'"),
    ("seed",): (-1, "manifest.json: seed: an integer from 0 to 18446744073709551615 is needed; got -1"),
    ("num_samples",): (5, "manifest.json: num_samples: it says 5, and its 2 shards have 6"),
    ("nbytes",): (True, "manifest.json: nbytes: an integer from 0 to 9223372036854775807 is needed; got True"),
    ("extensions",): (["jpg", "cls"], "manifest.json: extensions: they must be sorted and without duplicates"),
    ("extensions", 1): ("a/b", "manifest.json: extensions[1]: an extension in lower case, without a slash, is needed; got 'a/b'"),
    ("shards",): ({}, "manifest.json: shards: a list is needed; got {}"),
    ("shards", 1): (3, "manifest.json: shards[1]: an object with name, nbytes, num_samples, crc32c, index is needed; got 3"),
    ("more",): (1, "manifest.json: 'more' is not known in version 1"),
    ("shards", 1, "name"): (
        "../x",
        f"manifest.json: shards[1].name: {GENERATION}/shard-000000.tar or the like is needed; got '../x'",
    ),
    ("shards", 0, "nbytes"): (0, "manifest.json: shards[0].nbytes: an integer from 1 to 9223372036854775807 is needed; got 0"),
    ("shards", 0, "crc32c"): ("BEEF", "manifest.json: shards[0].crc32c: 8 hexadecimal digits are needed; got 'BEEF'"),
    ("shards", 0, "index"): ([], "manifest.json: shards[0].index: an object with name, nbytes, crc32c is needed; got []"),
    ("shards", 0, "index", "name"): (
        "a",
        f"manifest.json: shards[0].index.name: {GENERATION}/shard-000000.tar.index is needed; got 'a'",
    ),
    ("shards", 0, "index", "crc32c"): (None, "manifest.json: shards[0].index.crc32c: 8 hexadecimal digits are needed; got None"),
}


@pytest.mark.parametrize("where", WRONG, ids=str)
def test_error_names_the_problem_and_its_place(where: tuple[Any, ...]) -> None:
    value, text = WRONG[where]
    with pytest.raises(ShardCorrupt) as caught:
        Manifest.parse(changed(where, value))
    assert text == str(caught.value)


def test_shard_numbers_may_exceed_a_million() -> None:
    assert ShardRecord(0, (), entry(1_234_567)).number == 1_234_567


def test_duplicate_shard_is_an_error() -> None:
    told = json.loads(MANIFEST.dump())
    told["shards"][1] = told["shards"][0]
    with pytest.raises(ShardCorrupt, match=r"^s3://b/m: shards: two of them have the same name$"):
        Manifest.parse(json.dumps(told).encode(), name="s3://b/m")


def test_missing_entry_is_named() -> None:
    told = json.loads(MANIFEST.dump())
    del told["shards"][0]["crc32c"]
    with pytest.raises(ShardCorrupt, match=r"^manifest.json: shards\[0\]: crc32c is missing$"):
        Manifest.parse(json.dumps(told).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 1}', b"1" * 5000], ids=["empty", "bytes", "deep", "double", "long"]
)
def test_invalid_json_is_an_error(data: bytes) -> None:
    with pytest.raises(ShardCorrupt, match=r"^manifest.json: "):
        Manifest.parse(data)


@given(st.integers(0, len(MANIFEST.dump()) - 1), st.integers(1, 255), st.booleans())
@settings(max_examples=300)
def test_damaged_manifest_is_an_error_or_consistent(at: int, flip: int, cut: bool) -> None:
    data = bytearray(MANIFEST.dump())
    data[at] ^= flip
    try:
        found = Manifest.parse(bytes(data[:at] if cut else data))
    except ShardCorrupt:
        return
    assert found.num_samples == sum(shard.num_samples for shard in found.shards)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(list(WRONG)), values)
@settings(max_examples=300)
def test_any_value_in_any_place_is_an_error_or_valid(where: tuple[Any, ...], value: Any) -> None:
    data = changed(where, value)
    try:
        found = Manifest.parse(data)
    except ShardCorrupt:
        return
    assert json.loads(data) == json.loads(found.dump())


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
indexes = st.builds(IndexEntry, texts, sizes, texts)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_shard_table_has_all_shards(data: st.DataObject) -> None:
    store = LocalStore(Path("/"))
    values = (st.one_of(st.none(), kind) for kind in (sizes, texts, indexes))
    row = st.builds(RemoteShard, st.just(store), texts, sizes, texts, *values, compression=st.sampled_from(["", "zst"]))
    shards = data.draw(st.lists(row, min_size=1, max_size=8))
    table = ShardTable(shards)
    for again in (table, pickle.loads(pickle.dumps(table))):
        assert [(shard.key, shard.index, shard.compression) for shard in again] == [(s.key, s.index, s.compression) for s in shards]
        assert again[-1].key == shards[-1].key
        assert [shard.nbytes for shard in again[1:3]] == [shard.nbytes for shard in shards[1:3]]
        with pytest.raises(IndexError):
            again[len(shards)]
    of_table, of_objects = Shards(table), Shards(tuple(shards))
    for name in ("nbytes", "num_samples", "etag"):
        assert of_table.values(name) == of_objects.values(name)
    assert (of_table.nbytes, of_table.largest) == (of_objects.nbytes, of_objects.largest)
    most = data.draw(sizes)
    assert (of_table.too_large(most) is None) == (of_objects.too_large(most) is None)
