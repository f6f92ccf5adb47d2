"""An index made with range reads equals the index of the whole shard."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.errors import ShardCorrupt
from shmload.formats.tar import tar_format
from shmload.formats.tar.shard_index import pack_index
from shmload.formats.tar.tar_format import scan_remote

MEMBERS = st.lists(
    st.tuples(st.text("abc/é", min_size=1, max_size=140), st.integers(0, 70_000)), max_size=12, unique_by=lambda m: m[0]
)


def archive(members: list[tuple[str, int]], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for number, (name, nbytes) in enumerate(members):
            info = tarfile.TarInfo(f"{number}{name}.bin")
            info.size = nbytes
            tar.addfile(info, io.BytesIO(bytes(nbytes)))
    return file.getvalue()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@settings(max_examples=40, deadline=None)
@given(members=MEMBERS, piece=st.sampled_from([512, 1000, 8192, 1 << 20]))
def test_headers_read_as_ranges_give_the_same_index(form: int, members: list[tuple[str, int]], piece: int) -> None:
    data = archive(members, form)
    asked = []

    def read(offset: int, nbytes: int) -> bytes:
        asked.append((offset, nbytes))
        return data[offset : offset + nbytes]

    before, tar_format.PIECE = tar_format.PIECE, piece
    try:
        assert pack_index("x", data) == scan_remote("x", len(data), read)
    finally:
        tar_format.PIECE = before
    spans = sorted(asked)
    assert all(at + nbytes <= after for (at, nbytes), (after, _) in itertools.pairwise(spans))  # no byte is read twice


def test_large_members_are_skipped_while_indexing() -> None:
    data = archive([("a", 40 << 20), ("b", 30 << 20)], tarfile.GNU_FORMAT)
    read = [0]

    def ranges(offset: int, nbytes: int) -> bytes:
        read[0] += nbytes
        return data[offset : offset + nbytes]

    assert pack_index("x", data) == scan_remote("x", len(data), ranges)
    assert read[0] < 20 << 20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_error_of_a_damaged_shard_names_shard_and_offset(data: st.DataObject) -> None:
    whole = archive([("a", 600), ("b", 600)], tarfile.GNU_FORMAT)
    cut = data.draw(st.integers(0, 4 * 512 + 1023))
    with pytest.raises(ShardCorrupt, match=r"s3://b/x.tar: at byte \d+: "):
        scan_remote("s3://b/x.tar", cut, lambda at, nbytes: whole[:cut][at : at + nbytes])


def test_too_long_member_name_is_refused(tmp_path: Path) -> None:
    data = archive([("a" * (1 << 20), 1)], tarfile.GNU_FORMAT)
    with pytest.raises(ShardCorrupt, match=r"x: at byte 512: a name of \d+ bytes; at most 1048576 are read"):
        scan_remote("x", len(data), lambda at, nbytes: data[at : at + nbytes])
