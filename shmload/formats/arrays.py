"""ArrayDataset: samples that are rows of arrays, which the processes of a loader share.

Rows are copied directly into the batch. A file's array is mapped again from its path in each process. An array in memory is
inherited by forked workers. Before it is pickled, it is moved once to a shared segment, from which the dataset then reads. Spawned
workers map this segment, which belongs to the process that created it.
"""

from __future__ import annotations

import math
import mmap
import operator
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shmload._core.mapped_file import MappedFile
from shmload.batch.array_rows import ArrayRows, TypedArray, typed_array
from shmload.batch.layout import aligned, c_strides
from shmload.batch.row_placer import OneSample
from shmload.errors import ShardCorrupt
from shmload.formats.npy_header import npy_head
from shmload.formats.paths import check_file
from shmload.formats.shared_bytes import SharedBytes


class ArrayPlace(NamedTuple):
    """The location of an array in a file, or in the shared segment if `path` is None. Offset and strides are in bytes."""

    path: str | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numpy: str  # numpy's string for the stored dtype, including its byte order
    dtype: str  # name of the dtype in the batch
    head: bytes = b""  # the start of the file, up to the data, such as the header of a .npy file


def npy_place(path: str | os.PathLike[str]) -> ArrayPlace:
    """Read the header of a .npy file.

    Raises:
        ShardCorrupt: it is not a .npy file, or it is shorter than its header requires.
    """
    check_file(path, "ArrayDataset")
    path = os.path.abspath(path)
    with open(path, "rb") as file:
        try:
            shape, is_fortran, dtype = npy_head(file)
        except Exception as error:  # a malicious header fails in many ways inside numpy's parser
            raise ShardCorrupt(f"{path}, offset {file.tell()}: this is not the header of a .npy file: {error}") from error
        offset, nbytes = file.tell(), os.fstat(file.fileno()).st_size
        file.seek(0)
        head = file.read(offset)
    if dtype.hasobject or any(extent < 0 for extent in shape):
        raise ShardCorrupt(f"{path}, offset 10: an array of {dtype} and shape {shape} is not a block of numbers")
    needed = dtype.itemsize * math.prod(shape)
    if offset + needed > nbytes:
        raise ShardCorrupt(f"{path}, offset {offset}: shape {shape} of {dtype} needs {needed} bytes, {nbytes - offset} are left")
    order = c_strides(shape[::-1], dtype.itemsize)[::-1] if is_fortran else c_strides(shape, dtype.itemsize)
    return ArrayPlace(path, offset, tuple(shape), order, dtype.str, dtype.name, head)


class FileMap:
    """A mapped file. No descriptor stays open, because a dataset may have more files than a process may open.

    Args:
        path: path of the file.
    Attributes:
        bytes: the contents of the file, read-only.
        head: the file's header when the dataset was created.
        end: the offset at which the part that is read ends.
    """

    def __init__(self, path: str, head: bytes = b"", end: int = 0) -> None:
        self._path, self.head, self.end = path, head, end
        self._file = MappedFile(os.fsencode(path))
        self.bytes = memoryview(self._file)

    def check(self) -> None:
        """Check that the file has its header, and is long enough, because the system kills processes that read past the end.

        A file that is truncated after this check, while a batch is being read, still kills the process.

        Raises:
            ShardCorrupt: the file has become shorter, or has another header.
        """
        if self._file.has_changed() and (nbytes := os.path.getsize(self._path)) < self.end:
            raise ShardCorrupt(
                f"{self._path}, offset {nbytes}: the file was cut off while it was read; its array ends at {self.end}"
            )
        if self.head and self.bytes[: len(self.head)] != self.head:
            raise ShardCorrupt(
                f"{self._path}: its header has changed since the dataset was created, as if another file had replaced it: create "
                "the dataset again"
            )


def mapped(place: ArrayPlace) -> tuple[np.ndarray[Any, Any], FileMap]:
    """Map the array of a file read-only. Return the array, and its file with the map.

    Raises:
        ShardCorrupt: the file has become shorter.
    """
    assert place.path is not None
    file = FileMap(place.path, place.head)
    try:
        array = np.ndarray(place.shape, place.numpy, file.bytes, place.offset, place.strides)
    except (TypeError, ValueError) as error:
        raise ShardCorrupt(f"{place.path}, offset {place.offset}: the array does not end within the file: {error}") from error
    steps = zip(place.shape, place.strides, strict=True)
    file.end = place.offset + array.itemsize + sum(max((n - 1) * step, 0) for n, step in steps) if array.size else 0
    return array, file


def _npz_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Read the arrays of a .npz file into memory.

    Raises:
        ShardCorrupt: it is damaged, or contains an array of Python objects.
    """
    check_file(path, "ArrayDataset")
    os.stat(path)  # raises an error that names the path
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return dict(file.items())
    except Exception as error:  # raised by zip, zlib or numpy's parser
        raise ShardCorrupt(f"{os.fspath(path)}: not a valid .npz file: {type(error).__name__}: {error}") from error


class HeldArrays:
    """Named arrays, given as .npy paths, places in files, memmaps, numpy arrays or CPU tensors.

    A pickle contains their locations, not their data.

    Attributes:
        arrays: the arrays by name: views of the given memory, or maps of files or of the shared segment.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._memory: SharedBytes | None = None
        self._places: dict[str, ArrayPlace] = {}
        self._files: dict[str, FileMap] = {}
        self.arrays: dict[str, TypedArray] = {}
        self.add(values)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add arrays. Call this before the arrays are shared."""
        for name, value in values.items():
            place = npy_place(value) if isinstance(value, (str, os.PathLike)) else _place_of(value)
            if place is None:
                self.arrays[name] = typed_array(name, value)
                continue
            array, self._files[name] = mapped(place)
            try:
                self.arrays[name] = typed_array(name, array)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{place.path}: {error}") from None
            self._places[name] = place._replace(dtype=self.arrays[name].dtype)

    def check(self, names: Iterable[str] | None = None) -> None:
        """Call `FileMap.check` of the files of some arrays, or of all."""
        for file in self._files.values() if names is None else [self._files[name] for name in names if name in self._files]:
            file.check()

    def share(self) -> None:
        """Copy the arrays in this process's memory to one shared segment, and use the copies from then on."""
        own = {name: a for name, a in self.arrays.items() if name not in self._places}
        if not own:
            return
        end = 0
        for name, (array, dtype) in own.items():
            strides = c_strides(array.shape, array.itemsize)
            self._places[name] = ArrayPlace(None, end, array.shape, strides, array.dtype.str, dtype)
            end += aligned(array.nbytes)
        # one at a time, because strided arrays are copied
        parts = (
            (self._places[name].offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for name, (array, _) in own.items()
        )
        try:
            self._memory = SharedBytes.written(end, parts, f"sharing the arrays {list(own)}")
        except BaseException:
            for name in own:
                del self._places[name]
            raise
        self._open(own)

    def _open(self, names: Any) -> None:
        for name in names:
            place = self._places[name]
            if place.path is not None:
                array, self._files[name] = mapped(place)
            else:
                assert self._memory is not None
                array = np.ndarray(place.shape, place.numpy, self._memory.mapping, place.offset, place.strides)
            self.arrays[name] = TypedArray(array, place.dtype)

    def __getstate__(self) -> tuple[Any, dict[str, ArrayPlace]]:
        self.share()
        return self._memory.to_pickle() if self._memory is not None else None, {name: self._places[name] for name in self.arrays}

    def __setstate__(self, state: tuple[Any, dict[str, ArrayPlace]]) -> None:
        reference, self._places = state
        self._memory = SharedBytes.attach(reference) if reference is not None else None
        self.arrays, self._files = {}, {}
        self._open(self._places)


def _place_of(value: Any) -> ArrayPlace | None:
    """Return the location of a memmap, or a part of one, in its file; None for memory that is private to this process."""
    if isinstance(value, ArrayPlace):
        return value
    if not isinstance(value, np.memmap) or value.mode == "c" or value.filename is None or value.ndim == 0:
        return None
    begin = np.frombuffer(value._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]  # numpy's own
    if not _is_still_at(value.filename, begin):
        return None  # the file has been removed or replaced
    file_begin = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY
    offset = file_begin + value.__array_interface__["data"][0] - begin
    head = b"" if file_begin else bytes(value._mmap[: value.offset])  # type: ignore[attr-defined]  # numpy's own
    return ArrayPlace(os.fspath(value.filename), offset, value.shape, value.strides, value.dtype.str, value.dtype.name, head)


def _is_still_at(path: str | os.PathLike[str], address: int) -> bool:
    """Return whether the file mapped at `address` is still the one at `path`; also True if /proc does not tell."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            span, _, _, _, inode, *shown = line.rstrip("\n").split(maxsplit=5)
            begin, _, end = span.partition("-")
            if int(begin, 16) <= address < int(end, 16):
                if shown == [os.path.realpath(path)]:
                    return True
                # possibly under another name; the inode number of a removed file may have been reused
                is_removed = not os.path.exists(path) or "".join(shown).endswith(" (deleted)")
                return not is_removed and int(inode) == os.stat(path).st_ino
    return True


class HeldDataset:
    """Base class of datasets that read `HeldArrays`. `_bind` creates `_rows` or `_reader`, which cannot be pickled."""

    _held: HeldArrays

    def _bind(self) -> None:
        raise NotImplementedError

    def shared(self) -> Self:
        """Copy arrays in this process's memory to shared memory, once. Return this dataset, which then reads the copies."""
        self._held.share()
        self._bind()
        return self

    # copies are this dataset, because Python would copy by `__getstate__`, which moves the arrays to shared memory
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.shared()).items() if name not in ("_rows", "_reader")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()


class ArrayDataset(HeldDataset):
    """Samples that are rows of arrays.

    Arrays in memory are read in place, and not copied for forked workers. For other processes they are copied to shared memory
    once, when the dataset is pickled or by `shared`; later changes to the originals have no effect.

    Args:
        arrays: the structure of a batch: a dict, tuple, list, named tuple, or a single array. Arrays are `.npy` paths, memmaps,
            numpy arrays (strided, any byte order) and CPU tensors of torch. The first axis counts samples. The path of a `.npz`
            file is also accepted; its arrays are read into memory as a dict.
    Raises:
        ShardCorrupt: a file does not match its header.
        TypeError, ValueError: the arrays' rows do not form samples; the message names the array.
    Cost: a copy of each row; the GIL is released while a batch is gathered.
    Thread/process safety: reading is safe from any thread; a pickled dataset is valid as long as the original exists.
    Example:
        >>> import numpy as np
        >>> from shmload.formats import ArrayDataset
        >>> dataset = ArrayDataset({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})
        >>> len(dataset), dataset[-1]["x"].tolist()
        (3, [4, 5])
    """

    def __init__(self, arrays: Any) -> None:
        self.batch_type: Any
        if isinstance(arrays, (str, os.PathLike)) and os.fspath(arrays).endswith(".npz"):
            arrays = _npz_arrays(arrays)
        if isinstance(arrays, Mapping):
            self.batch_type, named = dict, {str(k): v for k, v in arrays.items()}
            if len(named) < len(arrays):
                raise ValueError(f"two arrays have one name as text: {', '.join(map(repr, arrays))}; name each differently")
        elif isinstance(arrays, (tuple, list)):
            self.batch_type = type(arrays)
            names = getattr(arrays, "_fields", None) or [str(i) for i in range(len(arrays))]
            named = dict(zip(names, arrays, strict=True))
        else:
            self.batch_type, named = "single", {"data": arrays}
        self._held = HeldArrays(named)
        self._bind()

    def _bind(self) -> None:
        self._rows = ArrayRows(self._held.arrays)
        self.schema = self._rows.schema

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Copy the rows with these indices.

        Args:
            indices: int64, shape `(rows,)`.
            out: an array for each field, C-contiguous, with a leading dimension of `rows`.
        """
        self._held.check()
        self._rows.read_batch_into(indices, out)

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, index: int) -> Any:
        number = operator.index(index)  # a float would be truncated below
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        out = OneSample(self.schema)
        self.read_batch_into([number], out)
        sample = out.sample()
        values = list(sample.values())
        if self.batch_type == "single":
            return values[0]
        if self.batch_type is dict:
            return sample
        return self.batch_type(*values) if hasattr(self.batch_type, "_fields") else self.batch_type(values)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {dtype}{list(shape)}" for name, (dtype, shape) in self.schema.items())
        return f"<{type(self).__name__} of {len(self)} samples, {fields}>"
