"""Datasets of a case, made of its values and written to files where the kind is a format. Workers of every start method can
import them.
"""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, get_worker_info

from tests.crossing.cases import IN_PLACE, PLAIN, Case
from tests.crossing.values import ROWS_PER_FOLDER, VALUES, OwnGenerators, length, noise, row, sample, schema_of
from tests.storage.fault_proxy import Refuse, Reset, Status, Truncate, fault_proxy
from tests.storage.store_kit import web_server

CONCATENATED = 3
FAULT_SHARE = 1 / 12  # share of failing requests; six failures in a row end a read: one of 3 million reads

_lasting: list[ExitStack] = []  # servers, which run until the process ends


class FileInt(int):
    """An integer from a file, whose exact type depends on the format."""


class FileFloat(float):
    """A float from a file, whose exact type depends on the format."""


class BadSampleError(ValueError):
    """The error of a bad sample."""


def bad_indices(case: Case) -> set[int]:
    """Returns the indices of the samples that cannot be read."""
    return {(case.seed + 7 * number) % case.n for number in range(case.bad)} if case.n else set()


def check_good(case: Case, index: int, trainer: int = 0) -> None:
    """Raises BadSampleError for a bad sample, or kills the worker that reads it. A trainer that reads by itself gets the error."""
    if case.bad and index in bad_indices(case):
        if case.deadly and trainer not in (0, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        raise BadSampleError(f"sample {index} is bad")


class Samples:
    """A map-style dataset in plain Python."""

    def __init__(self, case: Case) -> None:
        self.case, self.trainer = case, os.getpid()
        self.own = OwnGenerators() if case.keeps else None
        self.same = np.arange(1 << 17) if case.backend == "ray" else None  # 1 MiB: its bytes are sent once to each node
        self.pass_number, self.newest = 0, ""  # the second: path of a file with the newest pass_number

    def __len__(self) -> int:
        return self.case.n

    def __getitem__(self, index: Any) -> Any:
        if self.same is not None:
            index = self.same[int(index)]
        check_good(self.case, int(index), self.trainer)
        if self.newest and (newest := int(Path(self.newest).read_text())) != self.pass_number:
            raise ValueError(f"pass_number is {self.pass_number}, and the program has set it to {newest}")
        return sample(self.case, int(index), self.drawn())

    def set_pass_number(self, number: int, newest: Path) -> None:
        """Sets an attribute, as programs do between passes, and tells samples which value they must see."""
        newest.with_suffix(".half").write_text(str(number))
        newest.with_suffix(".half").replace(newest)
        self.pass_number, self.newest = number, str(newest)

    def drawn(self) -> list[float] | None:
        """Returns the numbers that a sample draws, or None if it draws none."""
        return noise(self.own) if self.case.is_noisy else None


@dataclass
class CustomBatch:
    """A batch in a type of the dataset's own."""

    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def many_of(case: Case, indices: Sequence[int], samples: list[Any]) -> Any:
    """Returns what `__getitems__` returns for these samples."""
    if case.many in ("fewer", "more"):
        times = 0 if case.many == "fewer" else 2
        return [one for index, one in zip(indices, samples, strict=True) for _ in range(times if index % 3 == 1 else 1)]
    if case.many in ("tensor", "array"):
        array = np.array(samples)
        return array if case.many == "array" else torch.from_numpy(array)
    return {"list": list, "none": lambda _: None, "tuple": tuple, "object": CustomBatch}[case.many](samples)


class ManySamples(Samples):
    """The same dataset with `__getitems__`."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        return many_of(self.case, [int(index) for index in indices], [self[index] for index in indices])


class Keys(Samples):
    """The dataset that the oracle reads instead: its samples are (index, draws)."""

    def __getitem__(self, index: Any) -> Any:
        check_good(self.case, int(index))
        return int(index), self.drawn()


class InPlace(Samples):
    """A dataset that decodes rows in place."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.schema = schema_of(case)

    def __getitem__(self, index: Any) -> Any:
        whole = super().__getitem__(index)
        return {name: np.array(value) if name == "N" else value for name, value in whole.items()}

    def value(self, name: str, index: int) -> Any:
        """Returns the value of a field. Some bad samples have a text that is none, which they do not notice themselves."""
        if name == "s" and self.case.bad and index in bad_indices(self.case):
            return None
        return self.drawn() if name == "N" else VALUES[name](self.case, index)

    def check_good(self, index: int) -> None:
        """Raises BadSampleError for a bad sample, or kills the worker, unless the sample's text is bad."""
        if not (self.case.on_error != "raise" and not self.case.deadly and "s" in self.schema and self.case.seed % 2):
            check_good(self.case, index, self.trainer)

    def read_into(self, index: int, out: Any) -> None:
        """Writes some fields into their memory and assigns others."""
        index = int(index)
        self.check_good(index)
        for name in self.schema:
            value = self.value(name, index)
            if name == "v":
                if index % 2:
                    out[name] = value
                else:
                    out.reserve(name, len(value))[:] = value
            elif name in "ak" and index % 2:
                out[name][...] = value
            else:
                out[name] = value


class InPlaceBatches(InPlace):
    """A dataset that decodes batches in place."""

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Writes the batch field by field."""
        rows = [int(index) for index in indices]
        for index in rows:
            self.check_good(index)
        for name in self.schema:
            values = [self.value(name, index) for index in rows]
            if name == "v":
                place = out.reserve(name, [len(value) for value in values])
                if len(place):
                    place[:] = np.concatenate(values)
            elif name in "sy":
                out[name] = values
            elif name == "h":
                out[name][...] = torch.stack(values)
            else:
                out[name][...] = np.stack(values)


class Stream(IterableDataset[Any]):
    """An iterable dataset; of n workers, worker i yields every n-th item from item i on."""

    def __init__(self, case: Case, *, keys: bool = False) -> None:
        self.case = case
        self.keys = keys
        self.stages = [Shuffle(case.seed)] if case.extra == "stages" else []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        indices: Any = range(first, self.case.n, step)
        for stage in self.stages:
            indices = stage.applied(indices)
        return (StatefulItems if self.case.extra == "state" else Items)(self, indices)


class Shuffle:
    """A stage of a dataset. It keeps the number of its passes, the order of the current one and what is left of it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.counts = seed, SimpleNamespace(passes=0, taken=0)
        self.order: Any = (np.arange, torch.arange)[seed % 2](0)
        self.left: Any = (list, bytearray)[seed // 2 % 2]()

    def applied(self, indices: range) -> Iterator[int]:
        """Returns an iterator of the indices in this pass's order."""
        self.counts.passes += 1
        self.counts.taken = 0
        if len(self.order) != len(indices):
            self.order = (np.array, torch.tensor)[self.seed % 2](indices)
        self.order[:] = self.order[np.random.default_rng([self.seed, self.counts.passes]).permutation(len(indices))]
        self.left[:] = self.order.tolist()
        return self._taken(len(indices))

    def _taken(self, count: int) -> Iterator[int]:
        while self.counts.taken < count:
            self.counts.taken += 1
            yield self.left.pop()


class Items:
    """A pass over some items."""

    def __init__(self, stream: Stream, indices: Any) -> None:
        self.stream, self.indices, self.place = stream, indices, 0

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        index, case = self._next_index(), self.stream.case
        self.place += 1
        drawn = noise() if case.is_noisy else None
        return (index, drawn) if self.stream.keys else sample(case, index, drawn)

    def _next_index(self) -> int:
        if not isinstance(self.indices, range):
            return next(self.indices)
        if self.place >= len(self.indices):
            raise StopIteration
        return self.indices[self.place]


class StatefulItems(Items):
    """A pass over some items that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the saved position."""
        self.place = state["place"]


def _read_from_shards(case: Case, folder: Path, *, keys: bool = False) -> Any:
    """Returns an iterable dataset whose items are numbered by packed shards, in another order in each pass."""
    from shmload.remote import RemoteDataset, upload_cv_dataset

    upload_cv_dataset(({"cls": index} for index in range(case.n)), bucket=str(folder), maxcount=-(-case.n // 5), workers=0)
    return RemoteDataset.from_urls(str(folder), seed=case.seed).decode().to_tuple("cls").map(partial(_numbered, case, keys))


def _numbered(case: Case, keys: bool, number: tuple[int]) -> Any:
    drawn = noise() if case.is_noisy else None
    return (*number, drawn) if keys else sample(case, *number, drawn)


# ------------------------------------------------------------ functions for samples, which workers import by name


def as_list(samples: list[Any]) -> Any:
    """Returns the samples as a list, as a collate_fn."""
    return list(samples)


def renamed(samples: list[Any]) -> Any:
    """Returns the samples and their number, as a collate_fn."""
    return {"samples": list(samples), "count": len(samples)}


def same(samples: Any) -> Any:
    """Returns its argument, as a collate_fn."""
    return samples


COLLATE = {"list": as_list, "rename": renamed, "same": same}


# ------------------------------------------------------------ files


def _written(case: Case, index: int) -> dict[str, Any]:
    return {name: VALUES[name](case, index) for name in case.fields}


def _litter(folder: Path) -> None:
    """Adds files that other programs leave beside data; none of them is a sample."""
    data = min(path for path in folder.rglob("*") if path.is_file() and path.name not in ("manifest.json", "index.json"))
    name = data.name
    for place in (f".ipynb_checkpoints/{name}", f"_temporary/0/{name}", f"__MACOSX/._{name}", f"._{name}", f"_{name}"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data, folder / place)
    for name in ("README.md", "LICENSE", ".gitattributes", "dataset_info.json", "state.json", "_SUCCESS", "preview.png"):
        (folder / name).write_text("about the data")


def _tfrecord(case: Case, folder: Path) -> Any:
    from shmload.formats import TFRecordDataset, TFRecordWriter

    compression = case.extra if case.extra in ("gzip", "zlib") else None
    num_files = 3 if case.extra == "files" and case.n >= 3 else 1
    for number in range(num_files):
        with TFRecordWriter(folder / f"{number}.tfrecord", compression=compression) as writer:
            for index in range(number * case.n // num_files, (number + 1) * case.n // num_files):
                value = _written(case, index)
                writer.write(value["y"] if case.extra == "bare" else value)
    schema = {"y": bytes} if case.extra == "bare" else schema_of(case)
    records = "raw" if case.extra == "bare" else None
    if case.litter:
        _litter(folder)
    return TFRecordDataset(str(folder if case.litter else folder / "*.tfrecord"), schema, records=records)


EXTENSIONS = {"i": "i.cls", "a": "a.npy", "s": "s.txt", "v": "v.npy"}


def _write_tar(case: Case, folder: Path, num_files: int) -> list[Path]:
    from shmload.formats import TarWriter

    paths = [folder / f"part-{number:06d}.tar" for number in range(num_files)]
    for number, path in enumerate(paths):
        with TarWriter(path) as writer:
            for index in range(number * case.n // num_files, (number + 1) * case.n // num_files):
                value = {EXTENSIONS[name]: field for name, field in _written(case, index).items()}
                writer.write({"__key__": f"{index:05d}", **value})
    return paths


def _tar_options(case: Case) -> dict[str, Any]:
    return {"schema": {EXTENSIONS[name]: spec for name, spec in schema_of(case).items()}}


def _tar(case: Case, folder: Path) -> Any:
    from shmload.formats import TarDataset

    paths = _write_tar(case, folder, min(case.n, 3 if case.extra else 1))
    if case.litter:
        _litter(folder)
        return TarDataset(str(folder), **_tar_options(case))
    return TarDataset([str(path) for path in paths], **_tar_options(case))


def _remote(case: Case, folder: Path) -> Any:
    from shmload.remote import RemoteDataset

    if case.extra in ("zlib", "bare"):
        return _packed(case, str(folder)).indexed(
            fields={e: f"{e};{e}.zst" for e in map(EXTENSIONS.__getitem__, case.fields)}, **_tar_options(case)
        )
    paths = _write_tar(case, folder, min(case.n, 4))
    sizes = [path.stat().st_size for path in paths]
    room = {"gzip": max(sizes) * 6 // 10, "files": max(sizes) * 2}.get(case.extra, sum(sizes) * 2)
    ahead = (None, 0, max(sizes))[case.seed % 3]
    if case.litter:
        _litter(folder)
    urls: Any = str(folder)
    if case.store:
        urls = [f"{_url(case, folder)}/{path.name}" for path in paths]
    return RemoteDataset.from_urls(urls, cache_bytes=room, ahead_bytes=ahead).indexed(**_tar_options(case))


def _url(case: Case, folder: Path) -> str:
    """Returns the URL of one of the case's folders on its web server."""
    return f"{_server(folder.parent, case.store, case.seed)}/{folder.name}"


@cache
def _server(root: Path, store: str, seed: int) -> str:
    """Starts a web server over a folder, which runs as long as this process, and returns its URL."""
    lasting = ExitStack()
    url = lasting.enter_context(web_server(root))
    if store == "fails":
        proxy = lasting.enter_context(fault_proxy(url))
        rng = random.Random(seed)
        faults = [Refuse(), Status(503), Truncate(100), Reset(700)]
        proxy.script(*(rng.choice(faults) if rng.random() < FAULT_SHARE else None for _ in range(100_000)))
        url = proxy.url
    _lasting.append(lasting)
    return url


def _packed(case: Case, folder: str) -> Any:
    """Returns a packed dataset, read in its own order as an iterable: compressed by sample or shard, or encrypted with or without
    compression.
    """
    from shmload.remote import RemoteDataset

    key, _ = _coding(case)
    manifest = _pack(case, folder, range(case.n))
    room = max(shard.nbytes for shard in manifest.shards) * (1, 2, 8)[case.seed % 3]
    if case.litter:
        _litter(Path(folder))
    return RemoteDataset.from_urls(_url(case, Path(folder)) if case.store else folder, cache_bytes=room, key=key)


def _coding(case: Case) -> tuple[bytes | None, str | None]:
    """Returns the key and the compression of a packed dataset."""
    if case.extra not in ("zlib", "bare"):
        return None, None
    key = bytes(range(32)) if case.extra == "bare" else None
    return key, ("samples", "shards", None)[case.seed % (3 if key else 2)]


def _pack(case: Case, folder: str, indices: range) -> Any:
    """Appends samples to the packed dataset in the folder, or creates it."""
    from shmload.remote import upload_cv_dataset

    key, compress = _coding(case)
    samples = ({EXTENSIONS[name]: VALUES[name](case, index) for name in case.fields} for index in indices)
    maxcount = -(-case.n // 4)
    return upload_cv_dataset(samples, bucket=folder, maxcount=maxcount, workers=0, compress=compress, key=key, append=True)


def _followed(case: Case, folder: str) -> Any:
    """Returns a growing packed dataset, with a new cache on every call."""
    from shmload.remote import RemoteDataset

    key, compress = _coding(case)
    room = 1 << 26 if compress == "shards" or case.seed % 2 else 20_000 * (case.seed % 3)
    fields = {e: f"{e};{e}.zst" for e in map(EXTENSIONS.__getitem__, case.fields)}
    return RemoteDataset.from_urls(folder, cache_bytes=room, key=key).indexed(fields=fields, **_tar_options(case), follow=True)


def _foreign_layout(case: Case, folder: Path) -> Any:
    from shmload.formats.tfrecord.tfrecord_format import TFRecords
    from shmload.remote import RemoteDataset
    from shmload.remote.layouts import LitData
    from shmload.remote.listing import shards_in
    from shmload.storage.local_store import LocalStore

    layout = {"": "parquet", "gzip": "jsonl.gz", "zlib": "tfrecord", "files": "mds", "bare": "jsonl"}[case.extra]
    if layout == "mds" and case.seed % 2:
        layout = "bin"
    num_files = min(case.n, 4)
    for number in range(num_files):
        indices = range(number * case.n // num_files, (number + 1) * case.n // num_files)
        LAYOUT_WRITERS[layout](case, folder / f"part-{number}.{layout}", [_written(case, index) for index in indices])
    if case.litter:
        _litter(folder)
    asked = {"tfrecord": TFRecords(schema_of(case)), "bin": LitData(encryption=_cipher(_chunk_kind(case)))}.get(layout)
    shards = shards_in(LocalStore(folder), asked)
    room = (shards.largest + 1, shards.largest * 2, shards.nbytes * 2)[case.seed % 3]
    ahead = (None, 0, shards.largest)[case.seed // 3 % 3]
    return RemoteDataset(None, shards, cache_bytes=room, ahead_bytes=ahead).indexed()


def _write_parquet(case: Case, path: Path, samples: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"i": pa.int64(), "a": pa.list_(pa.float32()), "s": pa.string(), "v": pa.list_(pa.int64())}
    columns = {name: pa.array([sample[name] for sample in samples], kinds[name]) for name in case.fields}
    pq.write_table(pa.table(columns), path, row_group_size=1 + case.seed % 7)


def _write_json_lines(case: Case, path: Path, samples: list[dict[str, Any]]) -> None:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(sample) + "\n" * (1 + number % 2) for number, sample in enumerate(samples))


def _write_tfrecord(case: Case, path: Path, samples: list[dict[str, Any]]) -> None:
    from shmload.formats import TFRecordWriter

    with TFRecordWriter(path) as writer:
        for one in samples:
            writer.write(one)


def _write_mds(case: Case, path: Path, samples: list[dict[str, Any]]) -> None:
    """Writes a shard as MosaicML's writer does: offsets, columns, and samples of sizes and values."""
    encodings = {"i": "int", "a": f"ndarray:float32:{case.size}", "s": "str", "v": "ndarray:int64"}
    fixed = {"i": 8, "a": 4 * case.size}
    encode = {
        "i": lambda value: int(value).to_bytes(8, "little"),
        "a": lambda value: value.tobytes(),
        "s": lambda value: value.encode(),
        "v": lambda value: bytes([1 << 2 | 2]) + len(value).to_bytes(4, "little") + value.tobytes(),
    }
    bodies = []
    for each in samples:
        parts = {name: encode[name](each[name]) for name in case.fields}
        sizes = b"".join(len(parts[name]).to_bytes(4, "little") for name in case.fields if name not in fixed)
        bodies.append(sizes + b"".join(parts[name] for name in case.fields))
    names = list(case.fields)
    columns = {"names": names, "encodings": [encodings[n] for n in names], "sizes": [fixed.get(n) for n in names]}
    config = json.dumps({f"column_{what}": value for what, value in columns.items()}).encode()
    begin = 4 * (len(bodies) + 2) + len(config)
    bounds = np.cumsum([begin, *map(len, bodies)]).astype("<u4").tobytes()
    path.write_bytes(len(bodies).to_bytes(4, "little") + bounds + config + b"".join(bodies))


def _chunk_kind(case: Case) -> str:
    return ("", "chunk", "sample", "zstd")[case.seed // 2 % 4]


def _cipher(kind: str) -> Any:
    from cryptography.fernet import Fernet

    return Fernet(b"YSBrZXkgb2YgdGhlIGNyb3NzaW5ncywgMzIgYnl0ZXM=") if kind in ("chunk", "sample") else None


def _write_litdata(case: Case, path: Path, samples: list[dict[str, Any]]) -> None:
    """Writes a chunk as LitData's writer does: offsets, and items of sizes and leaves.

    Items are plain, compressed one by one, or encrypted one by one or as a whole.
    """
    kind = _chunk_kind(case)
    cipher = _cipher(kind)
    formats = {"i": "int", "a": "no_header_numpy:9", "s": "str", "v": "no_header_numpy:3"}
    encode = {"i": lambda value: int(value).to_bytes(8, "little"), "s": lambda value: value.encode()}
    items = []
    for each in samples:
        leaves = [encode[name](each[name]) if name in encode else each[name].tobytes() for name in case.fields]
        item = b"".join(len(leaf).to_bytes(4, "little") for leaf in leaves) + b"".join(leaves)
        if kind == "zstd":
            import zstandard

            item = zstandard.compress(item)
        items.append(cipher.encrypt(item) if kind == "sample" else item)
    bounds = np.cumsum([4 * (len(items) + 2), *map(len, items)]).astype("<u4").tobytes()
    chunk = len(items).to_bytes(4, "little") + bounds + b"".join(items)
    path.write_bytes(cipher.encrypt(chunk) if kind == "chunk" else chunk)
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": json.dumps(list(case.fields)), "children_spec": [leaf] * len(case.fields)}
    config = {
        "data_format": [formats[name] for name in case.fields],
        "data_spec": json.dumps([1, spec]),
        "compression": "zstd" if kind == "zstd" else None,
        "compression_level": "sample" if kind == "zstd" else None,
        "encryption": {"algorithm": "fernet", "level": kind} if cipher else None,
    }
    index = path.parent / "index.json"
    chunks = json.loads(index.read_text())["chunks"] if index.exists() else []
    chunks.append({"filename": path.name, "chunk_bytes": path.stat().st_size, "chunk_size": len(items)})
    index.write_text(json.dumps({"chunks": chunks, "config": config}))


LAYOUT_WRITERS: dict[str, Callable[[Case, Path, list[dict[str, Any]]], None]] = {
    "parquet": _write_parquet,
    "jsonl": _write_json_lines,
    "jsonl.gz": _write_json_lines,
    "tfrecord": _write_tfrecord,
    "mds": _write_mds,
    "bin": _write_litdata,
}


def _columns(case: Case) -> dict[str, Any]:
    whole = [_written(case, index) for index in range(case.n)]
    columns: dict[str, Any] = {}
    for name in case.fields:
        values = [value[name] for value in whole]
        columns[name] = torch.stack(values) if name in "ht" else np.array(values)
    return columns


def _arrays(case: Case, folder: Path) -> Any:
    from shmload.formats import ArrayDataset

    return ArrayDataset(_columns(case))


def _npy(case: Case, folder: Path) -> Any:
    from shmload.formats import ArrayDataset

    paths = {}
    for name, column in _columns(case).items():
        paths[name] = str(folder / f"{name}.npy")
        np.save(paths[name], column)
    return ArrayDataset(paths)


def _tensors(case: Case, folder: Path) -> Any:
    return TensorDataset(*(torch.as_tensor(column) for column in _columns(case).values()))


def _tokens_at(first: int, last: int) -> Any:
    return np.arange(first, last, dtype=np.int64) % 65_521


def _tokens(case: Case, folder: Path) -> Any:
    from shmload.formats import TokenDataset

    tokens = _tokens_at(0, case.n * max(case.size, 1)).astype(np.uint16 if case.extra else np.int64)
    if case.extra:
        ends = sorted({case.n // 3, case.n // 3 * 2, case.n} - {0})  # windows that end before the end of each file
        for i, (first, end) in enumerate(pairwise([0, *ends])):
            tokens[first * max(case.size, 1) : end * max(case.size, 1)].tofile(folder / f"tokens-{i}.bin")
        return TokenDataset(str(folder / "tokens-*.bin"), max(case.size, 1), dtype="uint16")
    return TokenDataset(tokens, max(case.size, 1))


def picture(case: Case, index: int) -> Any:
    """Returns the pixels of an image."""
    height = 2 + (length(case, index) % 5 if case.sizes != "even" else case.size % 5)
    pixels = np.arange(height * 4 * 3) + 3 * index
    return (pixels % 251).astype(np.uint8).reshape(height, 4, 3)


def _images(case: Case, folder: Path) -> Any:
    from shmload.formats import ImageDecoder, ImageFolder

    is_turned = case.seed % 2 == 1
    paths = [folder / f"{index:05d}.png" for index in range(case.n)]  # the extension does not say which kind of file it is
    for index, path in enumerate(paths):
        path.write_bytes(_picture_file(picture(case, index), case.seed // 2 + index, is_turned=is_turned))
    return ImageFolder([str(path) for path in paths], ImageDecoder(upright=is_turned), labels=range(case.n))


def _picture_file(pixels: Any, number: int, *, is_turned: bool) -> bytes:
    """Returns an image file of these pixels without loss, in one of several kinds. Some break a rule that no reader depends on.

    Args:
        number: chooses the kind and the orientation.
        is_turned: the pixels are those of the upright image.
    """
    from PIL import Image

    turn, options = 1, {}
    if is_turned:
        turn = number % 8 + 1
        exif = Image.Exif()
        exif[0x0112] = turn
        options["exif"] = exif.tobytes()
    stored = np.ascontiguousarray(_AS_STORED[turn](pixels))
    kind = ("PNG", "WEBP", "without an end", "wrong checksum", "TIFF")[number % 5]
    file = io.BytesIO()
    if kind == "WEBP":
        options |= {"lossless": True, "exact": True}
    if kind == "TIFF":
        options = {"tiffinfo": {0x0112: turn}} if is_turned else {}
    Image.fromarray(stored).save(file, kind if kind.isupper() else "PNG", **options)
    data = file.getvalue()
    if kind == "without an end":
        return data[:-12]
    if kind == "wrong checksum":  # the checksum of the pixels; only the end chunk follows
        return data[:-13] + bytes((data[-13] ^ 1,)) + data[-12:]
    return data


_AS_STORED: dict[int, Callable[[Any], Any]] = {  # stored pixels of an image that this EXIF orientation turns upright
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, -1),
}


def _parquet(case: Case, folder: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shmload.formats import ParquetDataset

    whole = [_written(case, index) for index in range(case.n)]
    columns: dict[str, Any] = {}
    for name in case.fields.replace("H", ""):
        values = [value[name] for value in whole]
        if name == "a":
            flat = np.concatenate(values) if values else np.empty(0, np.float32)
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat), case.size)
        elif name == "v":
            columns[name] = pa.array([value.tolist() for value in values], pa.list_(pa.int64()))
        else:
            columns[name] = pa.array(values, {"i": pa.int64(), "r": pa.float64(), "s": pa.string(), "y": pa.binary()}[name])
    table = pa.table(columns)
    if case.extra == "ray":
        return _ray_blocks([table.slice(first, 7) for first in range(0, case.n, 7)])
    if case.extra == "hive":
        for first in range(0, case.n, ROWS_PER_FOLDER):
            part = folder / f"H={first // ROWS_PER_FOLDER:03}"
            part.mkdir()
            pq.write_table(table.slice(first, ROWS_PER_FOLDER), part / "x.parquet", row_group_size=7)
    else:
        pq.write_table(table, folder / "x.parquet", row_group_size=7)
    if case.litter:
        _litter(folder)
    return ParquetDataset(str(folder if case.litter or case.extra == "hive" else folder / "x.parquet"))


def _ray_blocks(tables: list[Any]) -> Any:
    import ray
    import ray.data

    from shmload.formats import RayDataset

    if not ray.is_initialized():
        ray.init(address=os.environ["CROSSING_RAY"], logging_level="ERROR", log_to_driver=False)
    return RayDataset(ray.data.from_arrow(tables))


def _hdf5(case: Case, folder: Path) -> Any:
    import h5py

    from shmload.formats import HDF5Dataset

    with h5py.File(folder / "x.h5", "w") as file:
        for name, column in _columns(case).items():
            chunks = (min(5, case.n), *column.shape[1:]) if case.seed % 2 else None
            file.create_dataset(name, data=column, chunks=chunks)
    return HDF5Dataset(str(folder / "x.h5"), {name: f"/{name}" for name in case.fields})


def _zarr(case: Case, folder: Path) -> Any:
    import zarr

    from shmload.formats import ZarrDataset

    group = zarr.open_group(str(folder / "x.zarr"), mode="w")
    for name, column in _columns(case).items():
        group.create_array(name, data=column, chunks=(min(5, case.n), *column.shape[1:]))
    return ZarrDataset(str(folder / "x.zarr"), {name: name for name in case.fields})


def _safetensors(case: Case, folder: Path) -> Any:
    from safetensors.torch import save_file

    from shmload.formats import SafetensorsDataset

    save_file({name: torch.as_tensor(column) for name, column in _columns(case).items()}, folder / "x.safetensors")
    return SafetensorsDataset(str(folder / "x.safetensors"), list(case.fields))


def _hf(case: Case, folder: Path) -> Any:
    import datasets

    kinds = {
        "i": datasets.Value("int64"),
        "r": datasets.Value("float32"),
        "s": datasets.Value("string"),
        "v": datasets.Sequence(datasets.Value("int64")),
        "a": datasets.Sequence(datasets.Value("float32"), length=case.size),
    }
    whole = [_written(case, index) for index in range(case.n)]
    columns = {name: [value[name] for value in whole] for name in case.fields}
    features = datasets.Features({name: kinds[name] for name in case.fields})
    return datasets.Dataset.from_dict(columns, features=features).with_format("torch")


def _growing(case: Case, folder: Path) -> Any:
    from shmload.growing import SampleCache

    cache = SampleCache(folder / "cache", 1 << 26)
    for part in range(2):
        with cache.writer(publish_s=1e9) as writer:
            for index in range(part * case.n // 2, (part + 1) * case.n // 2):
                writer.write(_written(case, index))
    return cache


MAKERS = {
    "tfrecord": _tfrecord,
    "tar": _tar,
    "remote": _remote,
    "foreign": _foreign_layout,
    "arrays": _arrays,
    "npy": _npy,
    "tensordataset": _tensors,
    "tokens": _tokens,
    "images": _images,
    "parquet": _parquet,
    "hdf5": _hdf5,
    "zarr": _zarr,
    "safetensors": _safetensors,
    "hf": _hf,
    "growing": _growing,
}


class CaseDataset:
    """A case's dataset. Its files are written once; each loader gets a fresh dataset over them, as the next run of a program
    would.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self._num_made = self._num_runs = 0
        self._cache: Any = None
        self._shared: Any = None
        self.size = case.n  # number of samples so far
        self._num_appends = 0

    def forget(self) -> None:
        """Drops the dataset that loaders have shared, and with it the memory in which its arrays were sent to workers."""
        self._shared = None

    def begin_run(self) -> None:
        """Begins a training run: the datasets made from now on belong to ranks that share one store of torch.distributed."""
        self._num_runs += 1
        if self.case.appends:
            from shmload import torch_names

            store = torch.distributed.HashStore()
            torch_names.default_store = lambda: store

    def append(self) -> None:
        """Adds a generation to the growing dataset, unless the case has no more."""
        if self._num_appends < self.case.appends:
            self._num_appends += 1
            first, self.size = self.size, self.size + 1 + self.case.n * (1 + self._num_appends % 2) // 3
            _pack(self.case, str(self.folder / "followed"), range(first, self.size))

    def fresh(self) -> Any:
        """Returns the dataset for one loader."""
        case = self.case
        if case.shares:
            self._shared = self._made() if self._shared is None else self._shared
            return self._shared
        return self._made()

    def _made(self) -> Any:
        case = self.case
        self._num_made += 1
        if case.kind == "growing":
            if self._cache is None:
                self._cache = _growing(case, self.folder)
            return self._cache.dataset(schema_of(case), timeout_s=0.0, run=f"run{self._num_runs}")
        if case.appends:
            if self._num_made == 1:
                _pack(case, str(self.folder / "followed"), range(case.n))
            return _followed(case, str(self.folder / "followed"))
        if case.kind in MAKERS or case.extra == "shards":
            folder = self.folder / str(self._num_made)
            folder.mkdir()
            return _read_from_shards(case, folder) if case.extra == "shards" else wrapped(case, MAKERS[case.kind](case, folder))
        return wrapped(case, with_own_names(case, plain(case)))

    def keys(self) -> Any:
        """Returns the dataset that the oracle reads instead."""
        case = self.case
        if case.kind == "growing":
            self.begin_run()
            return self._made()
        if case.extra == "shards":
            (folder := self.folder / "keys").mkdir()
            return _read_from_shards(case, folder, keys=True)
        return wrapped(case, Stream(case, keys=True) if case.kind == "iterable" else Keys(case), keys=True)


def plain(case: Case) -> Any:
    """Returns a dataset that needs no files."""
    if case.kind == "iterable":
        return Stream(case)
    if case.kind in IN_PLACE:
        return InPlace(case) if case.kind == "read_into" else InPlaceBatches(case)
    assert case.kind in PLAIN or case.kind == "mix"
    return ManySamples(case) if case.many else Samples(case)


def with_own_names(case: Case, dataset: Any) -> Any:
    """Returns the dataset, with the attributes that the program has set on it."""
    if case.program == "value":
        context: Any = multiprocessing.get_context(case.start)
        dataset.epoch, dataset.counts = context.Value("q", 0), context.Array("d", 2)
    if case.program == "names":
        vars(dataset).update(schema="public", read_into="table", keyed_order=3, epoch_schedule=[1, 2], state_dict={"a": 1})
        vars(dataset).update(load_state_dict=False, batch_type="train", in_place=True, given_rank=7, bytes_by_node=1)
    return dataset


class MixMember:
    """A member of a Mix: a range of the samples."""

    def __init__(self, whole: Any, first: int, count: int) -> None:
        self.whole, self.first, self.count = whole, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.whole[self.first + index]


def wrapped(case: Case, dataset: Any, *, keys: bool = False) -> Any:
    """Returns the dataset in the case's wrapper."""
    if case.kind == "mix":
        from shmload import Mix

        cut = max(case.n // 3, 1)
        members = [(MixMember(dataset, 0, cut), 0.3)]
        if case.n > cut:
            members.append((MixMember(dataset, cut, case.n - cut), 1.7))
        return Mix(members, stop="all" if case.extra else "first")
    if case.wrap == "subset":
        return Subset(dataset, list(range(case.n - 1, -1, -2)))
    if case.wrap == "concat" and type(dataset) is TensorDataset:  # many short members, whose rows are gathered at once
        size = case.n // 7 + 1
        starts = range(0, case.n, size)
        return ConcatDataset([TensorDataset(*(tensor[at : at + size] for tensor in dataset.tensors)) for at in starts])
    if case.wrap == "concat":
        cut = case.n // CONCATENATED
        return ConcatDataset([part for part in (Subset(dataset, range(cut)), Subset(dataset, range(cut, case.n))) if len(part)])
    return dataset


def size_of(case: Case) -> int:
    """Returns the number of samples that the loader sees."""
    return (case.n + 1) // 2 if case.wrap == "subset" else case.n


def _of_file(value: Any) -> Any:
    return FileInt(value) if type(value) is int else FileFloat(value) if type(value) is float else value


def delivered(case: Case, index: int, drawn: list[float] | None) -> Any:
    """Returns the sample as the dataset delivers it, whatever files it went through."""
    if case.kind == "tokens":
        size = max(case.size, 1)
        return {"tokens": _tokens_at(index * size, (index + 1) * size)}
    if case.kind == "images":
        return {"image": picture(case, index).transpose(2, 0, 1), "label": FileInt(index)}
    if case.kind == "tensordataset":
        return tuple(torch.as_tensor(VALUES[name](case, index)) for name in case.fields)
    if case.kind in IN_PLACE:
        return {
            name: np.array(drawn if drawn is not None else VALUES[name](case, index)) if name == "N" else VALUES[name](case, index)
            for name in case.fields
        }
    if case.kind in ("tar", "remote"):
        return {EXTENSIONS[name]: _of_file(VALUES[name](case, index)) for name in case.fields}
    if case.kind == "hf":
        return {
            name: torch.tensor(VALUES[name](case, index), dtype=torch.float32)
            if name == "r"
            else VALUES[name](case, index)
            if name == "s"
            else torch.as_tensor(VALUES[name](case, index))
            for name in case.fields
        }
    if case.kind in MAKERS:
        return {name: _of_file(VALUES[name](case, index)) for name in case.fields}
    return sample(case, index, drawn)


__all__ = ["CaseDataset", "delivered", "json", "row", "size_of"]
