"""Files that are compressed as a whole: every stream of them is read, or the error says where the damage is."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from shmload.errors import ShardCorrupt
from shmload.formats import TarStream, TarWriter, TFRecordDataset
from shmload.formats.compression import WINDOW, compression_of, expanded_file, expanded_pieces, packing_of
from shmload.formats.paths import inflated

Compress = Callable[[bytes], bytes]
COMPRESS: dict[str, Compress] = {
    "gz": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
FIRST, SECOND = b"first line\n" * 400, b"second line\n" * 600
SKIPPABLE = b"\x53\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello"  # a frame of zstd without data, as pzstd writes it


def expand(kind: str, data: bytes) -> bytes:
    return b"".join(expanded_pieces(kind, io.BytesIO(data)))


def hurt(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("kind", COMPRESS)
def test_streams_that_follow_each_other_are_all_read(kind: str) -> None:
    compress = COMPRESS[kind]
    assert expand(kind, b"".join(map(compress, (FIRST, b"", SECOND)))) == FIRST + SECOND
    with expanded_file(kind, io.BytesIO(compress(b"") + compress(FIRST))) as file:
        assert file.read(7) == FIRST[:7]
        assert file.read() == FIRST[7:]


@pytest.mark.parametrize(
    ("kind", "between", "after"),
    [("xz", 4, 0), ("xz", 40_000, 0), ("xz", 0, 8), ("xz", 4, 4), ("gz", 0, 1), ("gz", 40_000, 512), ("bz2", 0, 3), ("bz2", 5, 0)],
)
def test_padding_that_a_format_or_its_tool_allows_ends_no_data(kind: str, between: int, after: int) -> None:
    compress = COMPRESS[kind]
    assert expand(kind, compress(FIRST) + bytes(between) + compress(SECOND) + bytes(after)) == FIRST + SECOND


@pytest.mark.parametrize(("between", "after"), [(3, 0), (0, 2), (16_385, 0)])
def test_padding_of_xz_is_a_multiple_of_four(between: int, after: int) -> None:
    with pytest.raises(ValueError, match=r"bytes of padding end at byte .*, and the format allows multiples of 4"):
        expand("xz", lzma.compress(FIRST) + bytes(between) + lzma.compress(SECOND) + bytes(after))


def test_skippable_frames_of_zstd_are_skipped() -> None:
    compress = COMPRESS["zst"]
    assert expand("zst", SKIPPABLE + compress(FIRST) + SKIPPABLE * 2 + compress(SECOND) + SKIPPABLE) == FIRST + SECOND
    assert compression_of(SKIPPABLE) == "zst"
    with pytest.raises(ValueError, match=r"stream 2, which begins at byte .* does not end"):
        expand("zst", compress(FIRST) + SKIPPABLE[:-1])


@pytest.mark.parametrize("kind", COMPRESS)
def test_damage_in_a_later_stream_is_an_error_that_says_where(kind: str) -> None:
    whole, later = COMPRESS[kind](FIRST), COMPRESS[kind](SECOND)
    for at in range(len(later)):
        if kind == "gz" and at in range(3, 10):  # its flags, time and system, of which no checksum says anything
            continue
        with pytest.raises(
            ValueError, match=f"the {kind} stream is damaged or cut after .*stream 2, which begins at byte {len(whole)}"
        ):
            expand(kind, whole + hurt(later, at))


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_is_cut_anywhere_is_an_error(kind: str) -> None:
    whole, later = COMPRESS[kind](FIRST), COMPRESS[kind](SECOND)
    for end in range(len(later)):
        if end:
            with pytest.raises(ValueError, match=f"stream 2, which begins at byte {len(whole)}, does not end with the file's"):
                expand(kind, whole + later[:end])
        with pytest.raises(ValueError, match=f"stream 1, which begins at byte 0, does not end with the file's {end} bytes"):
            expand(kind, later[:end])


@pytest.mark.parametrize("kind", COMPRESS)
def test_garbage_behind_a_stream_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"stream 2, which begins at byte \d+: .*, or no stream follows the one before"):
        expand(kind, COMPRESS[kind](FIRST) + b"garbage garbage garbage")


def test_what_expands_enormously_comes_in_small_pieces() -> None:
    for kind in ("bz2", "xz"):
        assert max(map(len, expanded_pieces(kind, io.BytesIO(COMPRESS[kind](bytes(3 << 20)))))) <= 1 << 20


def test_zeros_behind_the_members_of_a_tfrecord_file_are_ignored() -> None:
    data = gzip.compress(FIRST) + bytes(3_000_000) + gzip.compress(SECOND) + bytes(512)
    assert inflated(data, "gzip", 1 << 30) == FIRST + SECOND
    with pytest.raises(ValueError, match=r"the gzip stream is (corrupted|truncated)"):
        inflated(data + b"x", "gzip", 1 << 30)


def long(window_log: int) -> bytes:
    """What `zstd --long` writes."""
    given = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=given).compressobj()
    return stream.compress(FIRST) + stream.flush()


def test_windows_of_zstd_have_a_limit_that_the_environment_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expand("zst", long(27)) == FIRST
    with pytest.raises(ValueError, match=f"a window of more than 128 MiB .zstd --long.: set {WINDOW}=31 in the environment"):
        expand("zst", long(28))
    monkeypatch.setenv(WINDOW, "28")
    assert expand("zst", long(28)) == FIRST
    with pytest.raises(ValueError, match="a window of more than 256 MiB"):
        expand("zst", long(29))
    monkeypatch.setenv(WINDOW, "32")
    with pytest.raises(ValueError, match=f"{WINDOW} must be an integer from 10 to 31, as for zstd --long, got '32'"):
        expand("zst", long(28))


def test_how_a_file_is_compressed_is_told_by_its_first_bytes() -> None:
    for kind in ("gz", "bz2", "xz", "zst"):
        assert compression_of(COMPRESS[kind](FIRST)) == compression_of(COMPRESS[kind](b"")) == packing_of(f"x.{kind}")[1] == kind
    for begin in (b"", b"BZh", b"BZhello.jpg", b"BZh9 is a name", b"{}"):
        assert compression_of(begin) == ""


def test_a_tar_file_whose_first_member_is_called_like_bzip2_is_read(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as tar:
        tar.write({"__key__": "BZh9", "cls": 1})
    assert [sample["cls"] for sample in TarStream(tmp_path / "a.tar", rank=0, world_size=1)] == [1]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_tar_file_with_a_damaged_later_stream_is_no_shorter_one(kind: str, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as tar:
        for number in range(40):
            tar.write({"__key__": str(number), "cls": number})
    data = (tmp_path / "a.tar").read_bytes()
    half = len(data) // 1024 * 512
    parts = [COMPRESS[kind](data[:half]), COMPRESS[kind](data[half:])]
    path = tmp_path / "b.tar"  # whose name does not say it
    path.write_bytes(b"".join(parts))
    assert [sample["cls"] for sample in TarStream(path, rank=0, world_size=1)] == list(range(40))
    path.write_bytes(parts[0] + hurt(parts[1], len(parts[1]) // 2))
    with pytest.raises(ShardCorrupt, match=r"b\.tar: at byte .*: the .* stream is damaged or cut after .* stream 2"):
        list(TarStream(path, rank=0, world_size=1))


def test_a_tfrecord_file_that_is_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(FIRST)[:-1])
    with pytest.raises(ShardCorrupt, match=r"a\.tfrecord: the gzip stream is truncated"):
        len(TFRecordDataset(path))
