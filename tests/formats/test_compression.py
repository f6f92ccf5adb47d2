"""Compressed files: every stream of a file is read, or the error names the position of the damage."""

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
from shmload.formats.compression import WINDOW, compression_of, expanded_file, expanded_pieces, split_compression
from shmload.formats.inflate import inflated

Compress = Callable[[bytes], bytes]
COMPRESS: dict[str, Compress] = {
    "gz": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
FIRST, SECOND = b"first line\n" * 400, b"second line\n" * 600
SKIPPABLE = b"\x53\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello"  # an empty zstd frame, as pzstd writes it


def expand(kind: str, data: bytes) -> bytes:
    return b"".join(expanded_pieces(kind, io.BytesIO(data)))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("kind", COMPRESS)
def test_all_concatenated_streams_are_read(kind: str) -> None:
    compress = COMPRESS[kind]
    assert expand(kind, b"".join(map(compress, (FIRST, b"", SECOND)))) == FIRST + SECOND
    with expanded_file(kind, io.BytesIO(compress(b"") + compress(FIRST))) as file:
        assert file.read(7) == FIRST[:7]
        assert file.read() == FIRST[7:]


@pytest.mark.parametrize(
    ("kind", "between", "after"),
    [("xz", 4, 0), ("xz", 40_000, 0), ("xz", 0, 8), ("xz", 4, 4), ("gz", 0, 1), ("gz", 40_000, 512), ("bz2", 0, 3), ("bz2", 5, 0)],
)
def test_allowed_padding_does_not_end_the_data(kind: str, between: int, after: int) -> None:
    compress = COMPRESS[kind]
    assert expand(kind, compress(FIRST) + bytes(between) + compress(SECOND) + bytes(after)) == FIRST + SECOND


@pytest.mark.parametrize(("between", "after"), [(3, 0), (0, 2), (16_385, 0)])
def test_xz_padding_must_be_a_multiple_of_four_bytes(between: int, after: int) -> None:
    with pytest.raises(ValueError, match=r"bytes of padding end at byte .*, and the format allows multiples of 4"):
        expand("xz", lzma.compress(FIRST) + bytes(between) + lzma.compress(SECOND) + bytes(after))


def test_zstd_skippable_frames_are_skipped() -> None:
    compress = COMPRESS["zst"]
    assert expand("zst", SKIPPABLE + compress(FIRST) + SKIPPABLE * 2 + compress(SECOND) + SKIPPABLE) == FIRST + SECOND
    assert compression_of(SKIPPABLE) == "zst"
    with pytest.raises(ValueError, match=r"stream 2, which begins at byte .* does not end"):
        expand("zst", compress(FIRST) + SKIPPABLE[:-1])


@pytest.mark.parametrize("kind", COMPRESS)
def test_error_names_the_position_of_damage_in_a_later_stream(kind: str) -> None:
    whole, later = COMPRESS[kind](FIRST), COMPRESS[kind](SECOND)
    for at in range(len(later)):
        if kind == "gz" and at in range(3, 10):  # its flags, time and system, which no checksum covers
            continue
        with pytest.raises(
            ValueError, match=f"the {kind} stream is damaged or cut after .*stream 2, which begins at byte {len(whole)}"
        ):
            expand(kind, whole + damaged(later, at))


@pytest.mark.parametrize("kind", COMPRESS)
def test_truncation_at_any_byte_is_an_error(kind: str) -> None:
    whole, later = COMPRESS[kind](FIRST), COMPRESS[kind](SECOND)
    for end in range(len(later)):
        if end:
            with pytest.raises(ValueError, match=f"stream 2, which begins at byte {len(whole)}, does not end with the file's"):
                expand(kind, whole + later[:end])
        with pytest.raises(ValueError, match=f"stream 1, which begins at byte 0, does not end with the file's {end} bytes"):
            expand(kind, later[:end])


@pytest.mark.parametrize("kind", COMPRESS)
def test_garbage_after_a_stream_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"stream 2, which begins at byte \d+: .*, or no stream follows the one before"):
        expand(kind, COMPRESS[kind](FIRST) + b"garbage garbage garbage")


def test_decompression_bomb_is_expanded_in_small_pieces() -> None:
    for kind in ("bz2", "xz"):
        assert max(map(len, expanded_pieces(kind, io.BytesIO(COMPRESS[kind](bytes(3 << 20)))))) <= 1 << 20


def test_zeros_after_the_gzip_members_of_a_tfrecord_file_are_ignored() -> None:
    data = gzip.compress(FIRST) + bytes(3_000_000) + gzip.compress(SECOND) + bytes(512)
    assert inflated(data, "gzip", 1 << 30) == FIRST + SECOND
    with pytest.raises(ValueError, match=r"the gzip stream is (corrupted|truncated)"):
        inflated(data + b"x", "gzip", 1 << 30)


def long(window_log: int) -> bytes:
    """Returns data as `zstd --long` compresses it."""
    given = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=given).compressobj()
    return stream.compress(FIRST) + stream.flush()


def test_limit_of_the_zstd_window_can_be_raised_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_compression_is_detected_from_the_first_bytes() -> None:
    for kind in ("gz", "bz2", "xz", "zst"):
        assert {compression_of(COMPRESS[kind](data)) for data in (FIRST, b"")} == {kind}
        assert split_compression(f"x.{kind}") == ("x", kind)
    for begin in (b"", b"BZh", b"BZhello.jpg", b"BZh9 is a name", b"{}"):
        assert compression_of(begin) == ""


def test_tar_file_whose_first_member_name_begins_like_bzip2_is_read(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as tar:
        tar.write({"__key__": "BZh9", "cls": 1})
    assert [sample["cls"] for sample in TarStream(tmp_path / "a.tar", rank=0, world_size=1)] == [1]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_compressed_tar_file_with_a_damaged_later_stream_is_an_error(kind: str, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as tar:
        for number in range(40):
            tar.write({"__key__": str(number), "cls": number})
    data = (tmp_path / "a.tar").read_bytes()
    half = len(data) // 1024 * 512
    parts = [COMPRESS[kind](data[:half]), COMPRESS[kind](data[half:])]
    path = tmp_path / "b.tar"  # the name does not reveal the compression
    path.write_bytes(b"".join(parts))
    assert [sample["cls"] for sample in TarStream(path, rank=0, world_size=1)] == list(range(40))
    path.write_bytes(parts[0] + damaged(parts[1], len(parts[1]) // 2))
    with pytest.raises(ShardCorrupt, match=r"b\.tar: at byte .*: the .* stream is damaged or cut after .* stream 2"):
        list(TarStream(path, rank=0, world_size=1))


def test_error_names_the_truncated_tfrecord_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(FIRST)[:-1])
    with pytest.raises(ShardCorrupt, match=r"a\.tfrecord: the gzip stream is truncated"):
        len(TFRecordDataset(path))
