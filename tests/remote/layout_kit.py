"""A dataset in each layout, as other libraries write it, and its expected samples."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.fernet import Fernet

from shmload.formats.format import ShardFormat
from shmload.formats.tfrecord.tfrecord_format import TFRecords
from shmload.remote.layouts import LitData
from tests.remote.write_foreign import FERNET_KEY, lit_sample, mds_sample, row_sample

NUM_SAMPLES = 23
PER_SHARD = 7
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """A layout: how to write a dataset of it, and its samples without keys."""

    name: str
    write: Callable[[Path], None]
    sample: Callable[[int], dict[str, Any]]
    layout: str | ShardFormat | None = None
    is_compressed: bool = False

    def options(self) -> dict[str, Any]:
        return {} if self.layout is None else {"layout": self.layout}


def shards() -> list[range]:
    return [range(begin, min(begin + PER_SHARD, NUM_SAMPLES)) for begin in range(0, NUM_SAMPLES, PER_SHARD)]


def numbers(number: int) -> np.ndarray[Any, Any]:
    return np.arange(number % 5 + 1, dtype=np.float32) + number


def each(write: Callable[[Path, range], None], ending: str) -> Callable[[Path], None]:
    """Returns a function that writes a dataset shard by shard."""

    def made(folder: Path) -> None:
        for number, samples in enumerate(shards()):
            write(folder / f"part-{number:03d}{ending}", samples)

    return made


def each_compressed(write: Callable[[Path, range], None], ending: str, kind: str) -> Callable[[Path], None]:
    """Returns a function that writes such shards compressed by the standard library or zstandard, as two concatenated streams."""

    def compressed(data: bytes) -> bytes:
        import zstandard

        by = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}
        half = len(data) // 2
        return by[kind](data[:half]) + by[kind](data[half:])

    def written(path: Path, samples: range) -> None:
        write(path, samples)
        path.write_bytes(compressed(path.read_bytes()))

    return each(written, f"{ending}.{kind}")


def lines(path: Path, samples: range) -> None:
    with open(path, "w") as file:
        for number in samples:
            file.write(
                "\n \r\n" * (number % 3) + json.dumps({"label": number, "name": f"näme {number}"}) + ("\r\n", "\n")[number % 2]
            )
        file.write(json.dumps("end") * 0 + "\n" * (samples[0] % 2))
    if samples[0] == 0:  # a file without a newline at its end
        path.write_bytes(path.read_bytes().rstrip())


def array(path: Path, samples: range) -> None:
    with open(path, "wb") as file:
        np.save(file, np.stack([np.full((2, 3), number, ">i4") for number in samples]))


def table(path: Path, samples: range) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "label": list(samples),
        "name": [f"näme {n}" for n in samples],
        "x": [numbers(n).tolist() for n in samples],
        "raw": [bytes([n]) * n for n in samples],
        "none": [None if n % 2 else n / 2 for n in samples],
        "struct": [{"n": n, "names": [f"{n}"]} for n in samples],
        "lists": [[[n], []] for n in samples],
    }
    pq.write_table(pa.table(columns), path, row_group_size=3, compression="zstd")


def table_sample(number: int) -> dict[str, Any]:
    more = {"raw": bytes([number]) * number, "none": None if number % 2 else number / 2}
    more |= {"struct": {"n": number, "names": [f"{number}"]}, "lists": [[number], []]}
    return {"label": number, "name": f"näme {number}", "x": numbers(number).astype(np.float64), **more}


def records(path: Path, samples: range) -> None:
    from tfrecord import TFRecordWriter

    writer = TFRecordWriter(str(path))
    for n in samples:
        fields = {"label": (n - 3, "int"), "x": (numbers(n).tolist(), "float"), "name": (f"näme {n}".encode(), "byte")}
        writer.write({**fields, "ids": ([n, -n, 1 << 40], "int")})
    writer.close()


def record_sample(number: int) -> dict[str, Any]:
    ids = np.array([number, -number, 1 << 40])
    return {"label": np.array([number - 3]), "x": numbers(number), "name": f"näme {number}".encode(), "ids": ids}


def with_schema(number: int) -> dict[str, Any]:
    return {"label": np.int64(number - 3), "name": f"näme {number}", "ids": np.array([number, -number, 1 << 40])}


def archive(path: Path, samples: range) -> None:
    with tarfile.open(path, "w") as tar:
        for number in samples:
            for extension, data in (("cls", b"%d" % number), ("bin", bytes([number]) * number)):
                info = tarfile.TarInfo(f"{number:05d}.{extension}")
                info.size = len(data)
                tar.addfile(info, BytesIO(data))


def files(folder: Path) -> None:
    for number in range(NUM_SAMPLES):
        path = folder / f"class-{number % 3}/{number:05d}.PNG"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x89PNG %d" % number)


def copied(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(DATA / name, folder, dirs_exist_ok=True) and None


def mds_values(number: int) -> dict[str, Any]:
    made = mds_sample(number)
    return {**made, "picture": np.asarray(made["picture"])}


def litdata_values(number: int) -> dict[str, Any]:
    made = lit_sample(number)
    nested = [number, [number, f"{number}"]]
    return {**made, "picture": np.asarray(made["picture"]), "t": made["t"].numpy(), "flat": made["flat"].numpy(), "nested": nested}


def token_sample(number: int) -> dict[str, Any]:
    return {"value": np.arange(10 * number, 10 * number + 10)}


def line_sample(number: int) -> dict[str, Any]:
    return {"label": number, "name": f"näme {number}"}


def tar_sample(number: int) -> dict[str, Any]:
    return {"cls": b"%d" % number, "bin": bytes([number]) * number}


OPTIONAL = {"br": "brotli", "snappy": "snappy"}
SCHEMA = {"label": "int64", "name": str, "ids": ("int64", (3,))}
CASES = [
    Case("jsonl", each(lines, ".jsonl"), line_sample),
    *(
        Case(f"jsonl.{kind}", each_compressed(lines, ".jsonl", kind), line_sample, None, True)
        for kind in ("gz", "zst", "bz2", "xz")
    ),
    Case("npy", each(array, ".npy"), lambda n: {"data": np.full((2, 3), n, np.int32)}),
    Case("parquet", each(table, ".parquet"), table_sample),
    Case("tfrecord", each(records, ".tfrecord"), record_sample),
    Case("tfrecord, schema", each(records, ".tfrecords"), with_schema, TFRecords(SCHEMA)),
    Case("tfrecord, no ending", each(records, "-of-4"), record_sample, "tfrecord"),
    Case("tfrecord.gz", each_compressed(records, ".tfrecord", "gz"), record_sample, None, True),
    Case("tar", each(archive, ".tar"), tar_sample),
    Case("tar.gz", each_compressed(archive, ".tar", "gz"), tar_sample, None, True),
    Case("tar.zst", each_compressed(archive, ".tar", "zst"), tar_sample, None, True),
    Case("files", files, lambda n: {"png": b"\x89PNG %d" % n}),
    Case("mds", copied("mds"), mds_values),
    Case("mds.zstd", copied("mds_zstd"), mds_values, None, True),
    Case("mds.gz", copied("mds_gz"), mds_values, None, True),
    *(Case(f"mds.{kind}", copied(f"mds_{kind}"), mds_values, None, True) for kind, name in OPTIONAL.items() if find_spec(name)),
    Case("litdata batch", copied("litdata_batch"), litdata_values),
    Case("litdata sample", copied("litdata_sample"), litdata_values),
    Case("litdata fernet", copied("litdata_fernet"), litdata_values, LitData(encryption=Fernet(FERNET_KEY)), True),
    Case("litdata sealed", copied("litdata_sealed"), litdata_values, LitData(encryption=Fernet(FERNET_KEY))),
    Case("litdata sealed.zstd", copied("litdata_sealed_zstd"), litdata_values, LitData(encryption=Fernet(FERNET_KEY)), True),
    Case("litdata", copied("litdata"), litdata_values),
    Case("litdata.zstd", copied("litdata_zstd"), litdata_values, None, True),
    Case("litdata rows", copied("litdata_rows"), row_sample),
    Case("litdata rows.zstd", copied("litdata_rows_zstd"), row_sample),
    Case("litdata rows sealed", copied("litdata_rows_sealed"), row_sample, LitData(encryption=Fernet(FERNET_KEY))),
    Case("litdata, tokens", copied("litdata_tokens"), token_sample, LitData(block_size=10)),
    Case(
        "litdata, tokens sealed",
        copied("litdata_tokens_sealed"),
        token_sample,
        LitData(block_size=10, encryption=Fernet(FERNET_KEY)),
    ),
]


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; arrays by dtype, shape and elements."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
    return bool(one == other)


def identity(sample: dict[str, Any]) -> str:
    """Returns a sample's content as text, without its key and URL."""
    found = {name: value for name, value in sorted(sample.items()) if not name.startswith("__")}
    return repr({name: value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value for name, value in found.items()})


def numbers_by_content(case: Case) -> dict[str, int]:
    """Returns the numbers of a case's samples by their content."""
    return {identity(case.sample(number)): number for number in range(NUM_SAMPLES)}
