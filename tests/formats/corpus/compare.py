"""Read files with shmload and with the format's own library, and report whether the values are equal.

    python -m tests.formats.corpus.compare FOLDER < relative paths

Prints one line of JSON before each reading ({"begins": [file, reader]}) and one after it ({"file", "reader", "outcome", "said"}),
so
that a crash or a hang can be attributed to its file. Outcomes:

    equal     both read it, with equal values
    refused   neither reads it, and shmload raises a documented error that names the file
    stricter  shmload raises such an error, and the library reads the file
    differs   anything else: other values, an undocumented error, an error without the file's name, or only shmload reads it
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds
import zarr
from PIL import Image

from shmload import ShmloadError
from shmload.formats import ArrayDataset, HDF5Dataset, ImageDecoder, ImageFolder, ParquetDataset, TarDataset, TarStream, ZarrDataset
from shmload.remote import RemoteDataset

Reading = tuple[str, Callable[[], Any], Callable[[], Any]]  # reader's name, shmload's values, the library's values
DOCUMENTED = (ShmloadError, ValueError, TypeError, FileNotFoundError, NotImplementedError)
UNDOCUMENTED = (IndexError, KeyError, AttributeError, UnicodeError)  # some are ValueErrors
HDF5 = frozenset({".h5", ".hdf5", ".nc"})
TAR = frozenset({".tar", ".tgz"})
ARROW = frozenset({".feather", ".arrow", ".orc"})


def readings(path: Path) -> Iterator[Reading]:
    """Returns the ways to read a file, chosen by its name."""
    suffix = path.suffix.lower()
    if path.name == ".zarray":
        yield (
            "ZarrDataset",
            lambda: _rows(ZarrDataset(path.parent)),
            lambda: _array_rows({"data": zarr.open(path.parent, mode="r")}),
        )
    elif suffix == ".npy":
        yield "ArrayDataset", lambda: _rows(ArrayDataset({"data": path})), lambda: _array_rows({"data": np.load(path)})
        yield "RemoteDataset", lambda: _remote(path), lambda: _array_rows({"data": np.load(path)})
    elif suffix in HDF5:
        yield "HDF5Dataset", lambda: _rows(HDF5Dataset(path)), lambda: _hdf5_rows(path)
        for place in _datasets(path):
            yield (
                f"HDF5Dataset {place}",
                lambda place=place: _rows(HDF5Dataset(path, {"x": place})),
                lambda place=place: _hdf5_rows(path, place),
            )
    elif suffix == ".parquet":
        yield "ParquetDataset", lambda: _rows(ParquetDataset(path)), lambda: _parquet_rows(path, plain=True)
        for name in _columns(path):
            yield (
                f"ParquetDataset {name}",
                lambda name=name: _rows(ParquetDataset(path, [name])),
                lambda name=name: _parquet_rows(path, plain=True, columns=[name]),
            )
        yield "RemoteDataset", lambda: _remote(path), lambda: _parquet_rows(path, plain=False)
    elif suffix in TAR or path.name.endswith(".tar.gz"):
        if suffix == ".tar":
            yield "TarDataset", lambda: _rows(TarDataset(path, decode=False, cache=False)), lambda: _tar_rows(path)
        yield "TarStream", lambda: list(TarStream(str(path), decode=False)), lambda: _tar_rows(path)
        yield "RemoteDataset", lambda: _remote(path, decode=False), lambda: _tar_rows(path)
    elif suffix in Image.registered_extensions() and suffix not in ARROW:
        jpeg = path.read_bytes()[:3] == b"\xff\xd8\xff"
        for decoder in ("auto", "pillow", "libjpeg", "simplejpeg") if jpeg else ("auto", "pillow"):
            yield f"ImageFolder {decoder}", lambda decoder=decoder: _image(path, decoder), lambda: _pillow(path)


def compared(path: Path, reader: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[str, str]:
    """Returns (outcome, detail)."""
    expected = found = None
    try:
        expected = theirs()
    except Exception as error:
        refusal: Exception | None = error
    else:
        refusal = None
    try:
        found = ours()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        name = path.parent.name if path.name == ".zarray" else path.name
        if not isinstance(error, DOCUMENTED) or isinstance(error, UNDOCUMENTED) or name not in str(error):
            return "differs", f"error: {text}"
        return ("stricter" if refusal is None else "refused"), text
    if refusal is not None:
        return "differs", f"only shmload reads it: {type(refusal).__name__}: {refusal}"
    why = difference(found, expected)
    return ("differs", why) if why else ("equal", "")


def difference(found: Any, expected: Any) -> str:
    """Returns where two values differ, or "". Types count, except those of numbers in lists."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or sorted(found) != sorted(expected):
            return f"fields {sorted(found) if isinstance(found, dict) else found!r:.80}, not {sorted(expected)}"
        return next((f"{name}: {why}" for name in expected if (why := difference(found[name], expected[name]))), "")
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return f"{len(found)} values, not {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next((f"at {place}: {why}" for place, (a, b) in pairs if (why := difference(a, b))), "")
    if isinstance(expected, (np.ndarray, np.generic)):
        array, wanted = np.asarray(found), np.asarray(expected)
        if array.dtype != wanted.dtype.newbyteorder("=") or array.shape != wanted.shape:
            return f"{array.dtype} of {array.shape}, not {wanted.dtype} of {wanted.shape}"
        same = (array == wanted) | ((array != array) & (wanted != wanted))
        return "" if same.all() else f"{np.count_nonzero(~same)} of {same.size} values"
    if isinstance(found, np.ndarray) and isinstance(expected, list):
        return difference(found.tolist(), expected)
    if isinstance(found, np.generic):
        found = found.item()
    if isinstance(expected, float) and expected != expected:
        return "" if found != found else f"{found!r:.80}, not nan"
    return "" if type(found) is type(expected) and found == expected else f"{found!r:.80}, not {expected!r:.80}"


# ------------------------------------------------------------ shmload's values


def _rows(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


def _image(path: Path, decoder: Any) -> Any:
    return ImageFolder([path], ImageDecoder(decoder=decoder, layout="HWC"), labels=[0])[0]["image"]


def _remote(path: Path, **options: Any) -> list[Any]:
    """Returns the file's samples in file order, read from a folder that contains only this file."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        dataset = RemoteDataset.from_urls(folder, cache_folder=f"{folder}-cache")
        try:
            view = dataset.indexed(**options)
            samples = [view[index] for index in range(len(view))]
        finally:
            shutil.rmtree(f"{folder}-cache", ignore_errors=True)
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


# ------------------------------------------------------------ the libraries' values


def _pillow(path: Path) -> Any:
    """Returns the first frame as RGB, without alpha; of 16 bits, the high byte."""
    with Image.open(path) as picture:
        picture.load()
        if picture.mode.startswith("I;16"):
            return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        if picture.mode == "P" and "transparency" in picture.info:
            return np.asarray(picture.convert("RGBA"))[:, :, :3]
        return np.asarray(picture.convert("RGB"))


def _array_rows(arrays: dict[str, Any]) -> list[Any]:
    values = {name: array[...] for name, array in arrays.items()}
    return [{name: value[row] for name, value in values.items()} for row in range(len(next(iter(values.values()))))]


def _datasets(path: Path) -> list[str]:
    places: list[str] = []
    try:
        with h5py.File(path, "r") as file:
            file.visititems(lambda name, found: places.append(name) if isinstance(found, h5py.Dataset) else None)
    except Exception:
        return []
    return places


def _hdf5_rows(path: Path, place: str | None = None) -> list[Any]:
    with h5py.File(path, "r") as file:
        found = {"x": file[place]} if place else {name: file[name] for name in _datasets(path)}
        if not found:
            raise ValueError("no datasets")
        return _array_rows({name: _text(dataset) for name, dataset in found.items()})


def _text(dataset: Any) -> Any:
    """Returns UTF-8 strings as str, others as bytes."""
    string = h5py.check_string_dtype(dataset.dtype)
    if string is None:
        return dataset[...]
    values = dataset.asstr()[...] if string.encoding == "utf-8" else dataset[...]
    array = np.empty(values.shape, object)
    array[...] = values if string.encoding == "utf-8" else np.vectorize(bytes, otypes=[object])(values)
    return array


def _columns(path: Path) -> list[str]:
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return []


def _parquet_rows(path: Path, *, plain: bool, columns: list[str] | None = None) -> list[Any]:
    """Returns rows of Python values.

    Args:
        plain: times and dates as integers in their own unit, as ParquetDataset documents.
    """
    table = pq.read_table(path, columns=columns)
    if plain:
        for number, column in enumerate(table.columns):
            if pa.types.is_temporal(column.type):
                narrow = pa.types.is_date32(column.type) or pa.types.is_time32(column.type)
                table = table.set_column(number, table.column_names[number], column.cast(pa.int32() if narrow else pa.int64()))
    return table.to_pylist()


def _tar_rows(path: Path) -> list[Any]:
    """Returns webdataset's samples, without those of hidden files, which shmload ignores."""
    samples = list(wds.WebDataset(str(path), shardshuffle=False, handler=wds.reraise_exception))
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in samples
        if not sample["__key__"].endswith("/")
    ]


def main(folder: Path, paths: list[str]) -> None:
    warnings.simplefilter("ignore")  # the libraries warn about old files
    for path in paths:
        for reader, ours, theirs in readings(folder / path):
            print(json.dumps({"begins": [path, reader]}), flush=True)
            outcome, said = compared(folder / path, reader, ours, theirs)
            print(
                json.dumps({"file": path, "reader": reader, "outcome": outcome, "said": said.replace(os.fspath(folder), "")}),
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin.read().splitlines())
