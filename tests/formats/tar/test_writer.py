from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt
from shmload.formats import TarDataset, TarStream, TarWriter

SAMPLES = [{"__key__": f"{n}", "npy": np.arange(n), "cls": n, "txt": "é"} for n in range(5)]


def written(path: Path, samples: Any = SAMPLES, **options: Any) -> list[str]:
    with TarWriter(path, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.paths


def test_same_samples_give_the_same_bytes_in_any_order_of_members(tmp_path: Path) -> None:
    written(tmp_path / "a.tar.gz")
    written(tmp_path / "b.tar.gz", [dict(reversed(s.items())) for s in SAMPLES])
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_member_takes_512_bytes_plus_its_payload(tmp_path: Path) -> None:
    key = "d" * 150 + "/" + "k" * 90
    written(tmp_path / "a.tar", [{"__key__": key, "bin": b"x"}], mtime=7)
    with tarfile.open(tmp_path / "a.tar") as archive:
        (info,) = archive.getmembers()
    assert (f"{key}.bin", 512, 7, 0, 0, "") == (info.name, info.offset_data, info.mtime, info.uid, info.gid, info.uname)
    assert (tmp_path / "a.tar").stat().st_size == 10240


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/.\0_", exclude_categories=("Cs",)), min_size=1, max_size=90),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_key_is_read_back_by_shmload_and_by_tarfile(tmp_path: Path, parts: list[str]) -> None:
    key = "/".join(parts)
    written(tmp_path / "a.tar", [{"__key__": key, "bin": b"x" * len(key)}])
    assert [{"__key__": key, "bin": b"x" * len(key)}] == list(TarDataset(tmp_path / "a.tar", cache=False))
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [f"{key}.bin"] == archive.getnames()


@pytest.mark.parametrize("length", [96, 97, 98, 150, 152, 153, 300])
def test_leading_slash_of_a_key_is_kept(tmp_path: Path, length: int) -> None:
    key = "/" + "k" * (length - 1)  # with ".bin" 101 bytes, one more than the name field of a header has
    written(tmp_path / "a.tar", [{"__key__": key, "bin": b"x"}])
    assert TarDataset(tmp_path / "a.tar")[0]["__key__"] == key


def test_tar_program_reads_written_shards(tmp_path: Path) -> None:
    key = "e" * 300
    written(tmp_path / "a.tar", [{"__key__": "d/a", "bin": b"x"}, {"__key__": key, "bin": b"y"}])
    done = subprocess.run(["tar", "-tf", tmp_path / "a.tar"], capture_output=True, text=True, check=True)
    assert ["d/a.bin", f"{key}.bin"] == done.stdout.splitlines()


def test_new_shard_begins_after_a_number_of_samples(tmp_path: Path) -> None:
    paths = written(tmp_path / "%02d.tar", maxcount=2, start_shard=3)
    assert [str(tmp_path / f"0{n}.tar") for n in (3, 4, 5)] == paths
    assert [len(TarDataset(path)) for path in paths] == [2, 2, 1]


def test_no_shard_exceeds_its_size(tmp_path: Path) -> None:
    paths = written(tmp_path / "%d.tar", [{"__key__": str(n), "bin": bytes(3000)} for n in range(9)], maxsize=20480)
    assert max(Path(path).stat().st_size for path in paths) <= 20480
    assert len(TarDataset(paths)) == 9
    with pytest.raises(ValueError, match="takes 30720 bytes, and a shard has at most maxsize=20480"):
        written(tmp_path / "x%d.tar", [{"__key__": "0", "bin": bytes(30_000)}], maxsize=20480)


def test_interrupted_shard_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TarWriter(tmp_path / "a.tar") as writer:
        writer.write(SAMPLES[0])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"cls": 1}, "a sample needs its name under '__key__', a str; got None"),
        ({"__key__": "a"}, "sample 'a' has no members"),
        ({"__key__": "a.b", "cls": 1}, "cannot be separated again"),
        ({"__key__": "", "cls": 1}, "cannot be separated again"),
        ({"__key__": "__m__/a", "cls": 1}, "cannot be separated again"),
        ({"__key__": "a", "CLS": 1}, "cannot be separated again"),
        ({"__key__": "4", "cls": 1}, "two samples in a row are called '4'"),
        (
            {"__key__": "a", "bin": 1},
            "extension 'bin' has no encoder for values of type int: give bytes, or one of the extensions cbor",
        ),
    ],
)
def test_samples_that_could_not_be_read_back_are_an_error(tmp_path: Path, sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        written(tmp_path / "a.tar", [*SAMPLES, sample])
    with pytest.raises(TypeError, match="text is str or bytes; got int"):
        written(tmp_path / "a.tar", [{"__key__": "a", "txt": 1}])
    with pytest.raises(TypeError, match=r"an integer is needed, got 3.7: use an extension that can store it"):
        written(tmp_path / "a.tar", [{"__key__": "a", "cls": 3.7}])


def test_shard_limits_need_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a pattern for several shards"):
        TarWriter(tmp_path / "a.tar", maxcount=1)
    with pytest.raises(ValueError, match="maxcount must be at least 1 and maxsize at least 10240, got 0, None"):
        TarWriter(tmp_path / "%d.tar", maxcount=0)


@pytest.mark.parametrize("suffix", ["tar.zst", "tar.zstd", "TAR.ZST", "tar.br"])
def test_name_of_a_compression_that_is_not_written_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match=r"TarWriter compresses with gzip, bzip2 or xz, not as .*: compress a .tar afterward"):
        TarWriter(tmp_path / f"a.{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_ending_of_a_compression_is_recognized_in_upper_case(tmp_path: Path) -> None:
    written(tmp_path / "A.TAR.GZ")
    assert (tmp_path / "A.TAR.GZ").read_bytes().startswith(b"\x1f\x8b")


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_compressed_streams_give_the_same_samples(tmp_path: Path, suffix: str) -> None:
    paths = written(tmp_path / f"%d.{suffix}", maxcount=2)
    np.testing.assert_equal(SAMPLES, list(TarStream(paths)))
    assert [s["__key__"] for s in TarStream(paths, rank=1, world_size=3)] == ["2", "3"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_truncated_stream_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    written(path)
    whole = path.read_bytes()
    for nbytes in range(len(whole) // 3, len(whole) * 2 // 3, max(1, len(whole) // 9)):
        path.write_bytes(whole[:nbytes])
        if suffix != "tar" or nbytes < 11 * 1024:
            with pytest.raises(ShardCorrupt, match=r"at byte \d+"):
                list(TarStream(path))


def test_errors_of_a_stream_name_duplicate_members_and_trailing_data(tmp_path: Path) -> None:
    written(tmp_path / "a.tar", [{"__key__": "a", "bin": b"1"}])
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(data[:1024] + data)
    with pytest.raises(ShardCorrupt, match="at byte 1024: sample 'a' has two members of extension 'bin'"):
        list(TarStream(tmp_path / "b.tar"))
    (tmp_path / "b.tar").write_bytes(data + data)
    with pytest.raises(ShardCorrupt, match="there is data after the end marker"):
        list(TarStream(tmp_path / "b.tar"))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_stream_reads_long_names(tar_of: Any, format: int) -> None:
    key = "folder/" * 30 + "name"
    assert [sample["__key__"] for sample in TarStream(tar_of([(f"{key}.txt", b"text")], format))] == [key]
