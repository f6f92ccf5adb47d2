from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt
from shmload._core.tar import TarHeaders, TarScan
from shmload.formats import TarDataset, TarWriter
from shmload.formats.tar.shard_index import SUFFIX, load_index

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def samples_of(path: Path) -> list[dict[str, Any]]:
    return list(TarDataset(path, decode=False, cache=False))


def as_one(path: Path) -> bytearray:
    return bytearray(path.read_bytes())


def summed(block: bytearray) -> bytearray:
    """Returns the header with its checksum corrected."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [10, 99, 100, 150, 180])
def test_names_of_any_length_are_read_in_every_format(tar_of: Any, format: int, length: int) -> None:
    key = "d" * (length // 2) + "/" + "k" * (length // 2)
    path = tar_of([(f"{key}.bin", b"one"), (f"{key}.txt", b"two")], format)
    assert [{"__key__": key, "bin": b"one", "txt": b"two"}] == samples_of(path)


@pytest.mark.parametrize("format", FORMATS[1:])
def test_names_beyond_ustar_are_read(tar_of: Any, format: int) -> None:
    key = "d/" * 200 + "é" * 300
    assert [{"__key__": key, "bin": b"1"}] == samples_of(tar_of([(f"{key}.bin", b"1")], format))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b.jpg", ("a/b", "jpg")),
        ("a.b/c.seg.png", ("a.b/c", "seg.png")),
        ("a.tar.gz", ("a", "tar.gz")),
        ("./0.JPG", ("./0", "jpg")),
        ("__a__b.jpg", ("__a__b", "jpg")),
        ("c", None),
        ("a.b/c", None),
        ("._foo.jpg", None),
        ("dir/.hidden.jpg", None),
        ("__meta__", None),
        ("__meta__/a.jpg", None),
    ],
)
def test_names_are_split_into_key_and_extension_as_in_webdataset(tar_of: Any, name: str, expected: tuple[str, str] | None) -> None:
    found = samples_of(tar_of([(name, b"x")]))
    assert ([{"__key__": expected[0], expected[1]: b"x"}] if expected else []) == found


def test_adjacent_members_with_one_key_form_a_sample(tar_of: Any) -> None:
    members = [("a.x", b"1"), (".skipped.x", b""), ("a.y", b"2"), ("b.x", b"3"), ("a.x", b"4")]
    expected = [{"__key__": "a", "x": b"1", "y": b"2"}, {"__key__": "b", "x": b"3"}, {"__key__": "a", "x": b"4"}]
    assert expected == samples_of(tar_of(members))


def test_sample_does_not_continue_in_the_next_shard(tar_of: Any) -> None:
    paths = [tar_of([("a.x", b"1")], name="1.tar"), tar_of([("a.y", b"2")], name="2.tar")]
    expected = [{"__key__": "a", "x": b"1"}, {"__key__": "a", "y": b"2"}]
    assert expected == list(TarDataset(paths, decode=False))


def test_two_members_with_one_extension_are_an_error(tar_of: Any) -> None:
    path = tar_of([("a.x", b"1"), ("a.X", b"2")])
    with pytest.raises(ShardCorrupt, match=r"a\.tar: at byte 1024: a sample has two members of one extension"):
        samples_of(path)


@pytest.mark.parametrize("name", ["hidden/.b.txt", "b", "b.txt"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_folders_are_skipped_and_links_only_if_they_belong_to_no_sample(tmp_path: Path, link: Any, name: str) -> None:
    (tmp_path / "d.x" / "hidden").mkdir(parents=True)
    (tmp_path / "d.x" / "a.txt").write_text("text")
    link(tmp_path / "d.x" / "a.txt", tmp_path / "d.x" / name)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for each in ("d.x", "d.x/a.txt", f"d.x/{name}"):
            archive.add(tmp_path / each, each, recursive=False)
    if name == "b.txt":
        message = r"a\.tar: at byte \d+: a member is a link, so its data is elsewhere; write .* tar -h --hard-dereference"
        with pytest.raises(ShardCorrupt, match=message):
            samples_of(tmp_path / "a.tar")
    else:
        assert samples_of(tmp_path / "a.tar") == [{"__key__": "d.x/a", "txt": b"text"}]


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar program")
@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_written_by_the_tar_program_are_read(tmp_path: Path, format: str) -> None:
    for n in range(3):
        (tmp_path / f"{n}.bin").write_bytes(bytes([n]) * 700 * n)
    names = [f"{n}.bin" for n in range(3)]
    subprocess.run(["tar", "-C", tmp_path, f"--format={format}", "-cf", tmp_path / "a.tar", *names], check=True)
    assert [bytes([n]) * 700 * n for n in range(3)] == [s["bin"] for s in samples_of(tmp_path / "a.tar")]


def test_a_size_in_base_256_is_read(tar_of: Any) -> None:
    path = tar_of([("a.x", b"123")])
    data = as_one(path)
    data[124:136] = b"\x80" + (3).to_bytes(11, "big")
    data[:512] = summed(data[:512])
    path.write_bytes(data)
    assert samples_of(path) == [{"__key__": "a", "x": b"123"}]


def test_pax_records_override_path_and_size(tmp_path: Path) -> None:
    info = tarfile.TarInfo("wrong.bin")
    info.pax_headers = {"path": "right.txt", "size": "3"}
    info.size = 3
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as archive:
        archive.addfile(info, __import__("io").BytesIO(b"abc"))
    data = as_one(tmp_path / "a.tar")
    at = data.index(b"wrong.bin") if b"wrong.bin" in data else data.index(b"right.txt\0")
    data[at + 124 : at + 136] = b"%011o\0" % 0
    data[at : at + 512] = summed(data[at : at + 512])
    (tmp_path / "a.tar").write_bytes(data)
    assert samples_of(tmp_path / "a.tar") == [{"__key__": "right", "txt": b"abc"}]


def corrupted(tar_of: Any, at: int, value: bytes, *, is_summed: bool) -> Path:
    path: Path = tar_of([("a.x", b"123"), ("b.x", b"456")])
    data = as_one(path)
    data[at : at + len(value)] = value
    if is_summed:
        data[:512] = summed(data[:512])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "value", "is_summed", "cause"),
    [
        (0, b"z", False, "at byte 0: the checksum of a header is wrong"),
        (1024, b"z", False, "at byte 1024: the checksum of a header is wrong"),
        (257, b"other", True, "neither ustar's nor GNU's"),
        (124, b"z", True, "the size in a header is no number"),
        (124, b"\xff", True, "the size in a header is no number"),
        (124, b"77777777777", True, "reaches beyond the end of the file: it is truncated"),
        (156, b"S", True, "a sparse member cannot be read in place"),
        (156, b"x", True, "a PAX header holds a broken record"),
        (3000, b"z", False, "there is data after the end marker"),
    ],
)
def test_error_names_file_offset_and_cause_of_damage(tar_of: Any, at: int, value: bytes, is_summed: bool, cause: str) -> None:
    with pytest.raises(ShardCorrupt, match=r"a\.tar: at byte \d+: ") as caught:
        samples_of(corrupted(tar_of, at, value, is_summed=is_summed))
    assert cause in str(caught.value)


@pytest.mark.parametrize("flag", [b"L", b"x"])
def test_long_name_without_a_member_is_an_error(tar_of: Any, flag: bytes) -> None:
    path = tar_of([("a.x", b"11 path=bb\n")])
    data = as_one(path)
    data[156:157] = flag
    data[:512] = summed(data[:512])
    path.write_bytes(data)
    with pytest.raises(ShardCorrupt, match="a long name or PAX header has no member after it"):
        samples_of(path)


BROKEN_RECORDS = """
import sys
from shmload._core.tar import PAX, TarHeaders

for record in (b"0 path=x.y\\n", b"00 size=1\\n", b"9 a=bcde\\n0 path=x.y\\n", b"1 a=b\\n", b"3 a=b\\n", b"0 =", b"0", b"18446744073709551616 a=b\\n"):
    headers = TarHeaders()
    payload = memoryview(b"\\n" + record)[1:]  # a newline stands before it, as behind the value of a sound one
    print(headers.read_payload(PAX, payload), headers.cause)
"""


def test_pax_record_of_length_zero_is_an_error() -> None:
    """Run in a child process, because such a record once made the reader loop forever, deaf to signals, or read out of bounds."""
    done = subprocess.run([sys.executable, "-c", BROKEN_RECORDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["False a PAX header holds a broken record"] * 8)


def test_truncation_at_any_byte_is_an_error(tar_of: Any) -> None:
    whole = tar_of([("a.x", b"123"), ("b.x", b"456")]).read_bytes()
    for nbytes in range(0, 2049, 64):
        assert "truncated" in TarScan(whole[:nbytes]).cause, nbytes


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bit_of_a_header_is_an_error_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.tar"
    with TarWriter(path) as writer:
        writer.write({"__key__": "a/b", "bin": b"payload", "cls": 3})
    whole = as_one(path)
    before = TarScan(whole)
    at = data.draw(st.sampled_from([0, 1024])) + data.draw(st.integers(0, 511))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    after = TarScan(whole)
    assert after.cause or (before.keys, before.offsets, before.sizes) == (after.keys, after.offsets, after.sizes)


def test_empty_archive_has_no_samples(tar_of: Any) -> None:
    assert samples_of(tar_of([])) == []


def test_error_for_a_compressed_shard_names_a_remedy(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar.gz") as writer:
        writer.write({"__key__": "a", "cls": 1})
    with pytest.raises(ValueError, match=r"is compressed, .* decompress it once, or read it in order with .*TarStream"):
        len(TarDataset(tmp_path / "a.tar.gz"))


def test_index_file_is_reused_while_it_fits_the_shard(tar_of: Any) -> None:
    path = tar_of([("a.x", b"123")])
    first = load_index(str(path))
    kept = path.with_name(path.name + SUFFIX)
    written = kept.stat().st_mtime_ns
    again = load_index(str(path))
    assert written == kept.stat().st_mtime_ns
    assert first.members(0) == again.members(0) == [("x", 512, 3)]
    tar_of([("b.x", b"1"), ("c.x", b"2")])
    assert load_index(str(path)).num_samples == 2


@pytest.mark.parametrize("is_first", [False, True], ids=["a later member", "the first member"])
def test_shard_replaced_by_one_of_equal_size_and_time_is_not_read_by_its_old_index(tar_of: Any, is_first: bool) -> None:
    path = tar_of([(f"{n}.txt", b"same" if n else b"a" * 700) for n in range(6)])
    assert len(TarDataset(path)) == 6
    before = path.stat()
    if is_first:
        tar_of([(f"{n}.txt", b"same" if n < 5 else b"a" * 700) for n in range(6)])
    else:
        tar_of([(f"{n}.txt", b"other" if n == 2 else b"same" if n else b"a" * 700) for n in range(6)])
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    again = TarDataset(path)
    if is_first:  # noticed before the index is used
        assert [again[n]["txt"] for n in range(6)] == ["same"] * 5 + ["a" * 700]
    else:
        with pytest.raises(ShardCorrupt, match=r"replaced by a shard of the same size and time .*: remove .*a.tar.index"):
            again[2]


@pytest.mark.parametrize("at", [0, 8, 24, 32, 40, 56, 64, 72, 80, 90])
def test_damaged_index_is_rebuilt(tar_of: Any, at: int) -> None:
    path = tar_of([("a.x", b"123")])
    good = load_index(str(path)).members(0)
    kept = path.with_name(path.name + SUFFIX)
    data = as_one(kept)
    data[at] ^= 0x55
    kept.write_bytes(data)
    assert good == load_index(str(path)).members(0)
    kept.write_bytes(data[:at])
    assert good == load_index(str(path)).members(0)


def test_index_with_wrong_offsets_is_rebuilt(tar_of: Any) -> None:
    import struct
    import zlib

    path = tar_of([("a.x", b"123")])
    load_index(str(path))
    kept = path.with_name(path.name + SUFFIX)
    data = as_one(kept)
    data[64:72] = struct.pack("<Q", 1 << 40)  # the payload's offset, with the checksum corrected
    data[56:60] = struct.pack("<I", zlib.crc32(data[64:]))
    kept.write_bytes(data)
    assert load_index(str(path)).members(0) == [("x", 512, 3)]


def test_index_stays_in_memory_if_it_cannot_be_written(tar_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar_of([("a.x", b"123")])

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("shmload.formats.atomic_write.make_half", refuse)
    assert len(TarDataset(path)) == 1
    assert os.listdir(path.parent) == ["a.tar"]


def test_header_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="a tar header must have 512 bytes, got 3"):
        TarHeaders().read_header(b"abc")


def test_failed_shard_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "txt": "x"})
        monkeypatch.setattr("shmload.formats.tar.writer.os.replace", refuse)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_shards_need_no_descriptors(tmp_path: Path) -> None:
    for number in range(20):
        with TarWriter(tmp_path / f"{number:02}.tar") as writer:
            writer.write({"__key__": f"{number}", "cls": number})
    for _ in ("the indexes are built", "the saved indexes are used"):
        before = len(os.listdir("/proc/self/fd"))
        dataset = TarDataset(tmp_path)
        assert [sample["cls"] for sample in dataset] == list(range(20))
        assert len(os.listdir("/proc/self/fd")) == before
