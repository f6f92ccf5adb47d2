"""TarDataset: random access to the samples of WebDataset tar shards in local files.

The index of a shard is built by reading every header once. It is saved next to the shard as `<shard>.index`, so that later
processes only map it:

    magic | shard's size, modification time | counts | CRC-32 of the rest
    payload offsets, payload sizes, first member of each sample, ends of keys: uint64 | extension of each member: uint16
    extensions, each terminated by NUL | concatenated keys

The file is written under a temporary name and renamed. If that is not possible (a read-only folder), the index stays in memory. An
index that is damaged, or whose shard has changed, is rebuilt. All of it is validated, because its values become memory addresses.

With a schema, each field is read for a whole batch at once (`TarColumn`). Native readers copy values that are written in the usual
way. When they stop at a row, Python code decodes that row: it either converts the value or raises an error that explains what is
wrong.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.mapped_file import MappedFile
from shmload._core.tar import TarScan
from shmload._core.tar_rows import Members, TarRows
from shmload.batch.element_types import of_any
from shmload.batch.layout import fits
from shmload.batch.row_placer import OneSample, SingleRow
from shmload.errors import ShardCorrupt
from shmload.formats.compression import MAGIC_NBYTES, compression_of
from shmload.formats.field_names import names_of
from shmload.formats.paths import Paths, shard_paths, write_if_possible
from shmload.formats.per_process import PerProcess
from shmload.formats.row_numbers import checked_index, checked_indices
from shmload.formats.tar.members import INTEGERS, TEXTS, Decode, Decoders
from shmload.world import ForkLock

SUFFIX = ".index"
_HEADER = struct.Struct("<8s6QI4x")
_MAGIC = b"SHMTAR\x00\x01"


class ShardIndex:
    """The positions of the members in a shard.

    Attributes:
        offsets, sizes, member_extensions: one value per member; `first`: first member of each sample, and the end.
        extensions: in lower case; values of `member_extensions` are indices into this list.
        nbytes, mtime_ns: size and modification time of the shard.
    """

    def __init__(self, path: str, packed: Any) -> None:
        self.path = path
        _, self.nbytes, self.mtime_ns, num_samples, num_members, extensions_nbytes, keys_nbytes, _ = _HEADER.unpack_from(packed)
        self.num_samples = num_samples
        at = _HEADER.size

        def take(dtype: str, count: int) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(packed, dtype, count, at)
            at += array.nbytes
            return array

        self.offsets, self.sizes = take("<u8", num_members), take("<u8", num_members)
        self.first, self._key_ends = take("<u8", num_samples + 1), take("<u8", num_samples)
        self.member_extensions = take("<u2", num_members)
        extensions = take("u1", extensions_nbytes).tobytes()
        self.extensions = [e.decode("utf-8", "surrogateescape") for e in extensions.split(b"\0")[:-1]]
        self._keys = take("u1", keys_nbytes)

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        begin = int(self._key_ends[sample - 1]) if sample else 0
        return self._keys[begin : int(self._key_ends[sample])].tobytes().decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """Return (extension, offset, size) of each member of a sample."""
        return [
            (self.extensions[self.member_extensions[m]], int(self.offsets[m]), int(self.sizes[m]))
            for m in range(int(self.first[sample]), int(self.first[sample + 1]))
        ]

    def is_sound(self) -> bool:
        """Return whether all positions are inside the shard and inside the index."""
        first, ends, sizes = self.first, self._key_ends, self.sizes
        return bool(
            first[0] == 0
            and first[-1] == len(sizes)
            and np.all(first[1:] >= first[:-1])
            and np.all(ends[1:] >= ends[:-1])
            and (not len(ends) or ends[-1] == len(self._keys))
            and np.all(sizes <= self.nbytes)
            and np.all(self.offsets <= self.nbytes - sizes)
            and (not len(sizes) or self.member_extensions.max() < len(self.extensions))
        )


def map_file(path: str) -> tuple[mmap.mmap | bytes, os.stat_result]:
    """Map a file read-only. Return its bytes and its status at that time."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
    return data, status


def changed(index: ShardIndex) -> ShardCorrupt:
    """Return the error for a shard that has changed since it was indexed."""
    return ShardCorrupt(f"{index.path}: was changed since it was indexed, with {index.nbytes} bytes: make the dataset anew")


def load_index(path: str, *, cache: bool = True) -> ShardIndex:
    """Load the saved index of a shard if it is valid and up to date; otherwise build it, and save it if possible.

    Raises:
        ShardCorrupt: the shard is not a valid tar file; names offset and cause.
        ValueError: the shard is compressed.
    """
    if cache and (found := _kept(path)) is not None:
        return found
    data, status = map_file(path)
    if compression_of(bytes(data[:MAGIC_NBYTES])):
        raise ValueError(
            f"{path} is compressed, and its samples cannot be reached one by one: decompress it once, or read it in order with "
            "shmload.formats.TarStream"
        )
    packed = pack_index(path, data, mtime_ns=status.st_mtime_ns)
    if cache and not _has_its_own(path, status.st_size):
        write_if_possible(path + SUFFIX, packed)
    return ShardIndex(path, packed)


def pack_index(path: str, data: Buffer, *, mtime_ns: int = 0) -> bytes:
    """Build the index of a shard, in its saved form.

    Args:
        path: path of the shard, for errors.
        data: the shard's bytes; only headers are read.
        mtime_ns: modification time of the shard; 0 for an index that is distributed with the shard.
    Raises:
        ShardCorrupt: the shard is not a valid tar file; names offset and cause.
    """
    scan = TarScan(data)
    if scan.cause:
        raise ShardCorrupt(f"{path}: at byte {scan.offset}: {scan.cause}")
    extensions = b"".join(extension + b"\0" for extension in scan.extensions)
    arrays = (scan.offsets, scan.sizes, scan.first, scan.key_ends, scan.member_extensions)
    body = b"".join((*arrays, extensions, scan.keys))
    counts = (scan.num_samples, scan.num_members, len(extensions), len(scan.keys))
    return _HEADER.pack(_MAGIC, memoryview(data).nbytes, mtime_ns, *counts, zlib.crc32(body)) + body


def _has_its_own(path: str, nbytes: int) -> bool:
    """Return whether the index was packed with the shard. It must not be replaced, because the manifest has its checksum."""
    try:
        found = unpack_index(path, map_file(path + SUFFIX)[0], nbytes)
    except OSError:
        return False
    return found is not None and found.mtime_ns == 0


def _kept(path: str) -> ShardIndex | None:
    """Return the index next to the shard if it is valid and up to date, else None."""
    try:
        packed, _ = map_file(path + SUFFIX)
        status = os.stat(path)
    except OSError:
        return None
    found = unpack_index(path, packed, status.st_size)
    return found if found is not None and found.mtime_ns == status.st_mtime_ns else None


def unpack_index(path: str, packed: Any, nbytes: int) -> ShardIndex | None:
    """Return the index of a shard of `nbytes` bytes from its saved form; None if it is invalid.

    Args:
        path: path of the shard, for errors.
        packed: the saved index; the result refers to these bytes.
        nbytes: size of the shard.
    """
    if len(packed) < _HEADER.size:
        return None
    magic, its_nbytes, _, num_samples, num_members, extensions_nbytes, keys_nbytes, crc = _HEADER.unpack_from(packed)
    needed = _HEADER.size + 18 * num_members + 16 * num_samples + 8 + extensions_nbytes + keys_nbytes
    if (magic, its_nbytes, needed) != (_MAGIC, nbytes, len(packed)):
        return None
    if zlib.crc32(memoryview(packed)[_HEADER.size :]) != crc:
        return None
    found = ShardIndex(path, packed)
    return found if found.is_sound() else None


DecodeRow = Callable[[int], Any]  # row -> the value, as `__getitem__` returns it
KEY = "__key__"


@dataclass(frozen=True)
class TarColumn:
    """The reader of one field of a schema.

    Attributes:
        way: how its rows are read: "npy", "int", "raw", "str" and "bytes" natively, "decode" in Python.
        dtype: numpy's; str or bytes for text.
        shape: shape of a row; None is a ragged extent.
    """

    name: str
    number: int
    way: str
    dtype: Any
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, name: str, number: int, spec: Any, kinds: set[str]) -> TarColumn:
        """Create the column of a schema's field. `kinds` are the kinds of its members: "npy", "int", "raw", "str" or "decode".

        Raises:
            ValueError: numpy does not have the type.
        """
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        shape = tuple(shape)
        if dtype in (str, bytes):
            return cls(name, number, dtype.__name__ if kinds <= {"raw", dtype.__name__} else "decode", dtype, ())
        numpy = of_any(dtype).numpy
        if numpy is None:
            raise ValueError(f"schema[{name!r}]: {dtype} is no type of numpy's, as members of tar files are; convert it later")
        found = np.dtype(numpy)
        (kind,) = kinds if len(kinds) == 1 else ("decode",)
        is_native = (
            kind == "npy"
            or (kind == "int" and found.kind in "iu" and shape == ())
            or (kind == "raw" and (None not in shape or shape == (None,)))
        )
        return cls(name, number, kind if is_native else "decode", found, shape)

    def read(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        """Read the field of all rows of a batch into `out`."""
        if self.dtype in (str, bytes):
            found = [None] * members.count if self.way == "decode" else members.payloads(self.way == "str")
            out[self.name] = [decoded(row) if value is None else value for row, value in enumerate(found)]
        elif None in self.shape:
            self._read_ragged(members, out, decoded)
        else:
            self._read_fixed(members, out[self.name], decoded)

    def _read_fixed(self, members: Members, rows: Any, decoded: DecodeRow) -> None:
        is_plain = isinstance(rows, np.ndarray) and rows.flags.c_contiguous
        row = 0
        while row < members.count:
            if is_plain and self.way == "npy":
                row = members.read_npy(rows, row, self.dtype.str.encode(), np.array(self.shape, np.int64))
            elif is_plain and self.way == "int":
                row = members.read_ints(rows, row, self.dtype.itemsize, self.dtype.kind == "i")
            elif is_plain and self.way == "raw":
                row = members.read_raw(rows, row)
            if row < members.count:  # the native reader stopped at this row
                rows[row] = self.checked(decoded(row))
                row += 1

    def _read_ragged(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        count = members.count
        extents = np.empty((count, self.shape.count(None)), np.int64)
        shape = np.array([-1 if n is None else n for n in self.shape], np.int64)
        by_hand: dict[int, Any] = {}
        row = 0
        while row < count:
            if self.way == "npy":
                row = members.extents(extents, row, self.dtype.str.encode(), shape, self.dtype.itemsize)
            elif self.way == "raw":
                row = members.raw_extents(extents, row, self.dtype.itemsize)
            if row < count:
                value = by_hand[row] = self.checked(decoded(row))
                extents[row] = [n for n, s in zip(value.shape, self.shape, strict=True) if s is None]
                row += 1
        lengths = extents[:, 0].tolist() if extents.shape[1] == 1 else [tuple(each) for each in extents.tolist()]
        values = out.reserve(self.name, lengths)
        numels = extents.prod(axis=1) * int(np.prod([n for n in self.shape if n is not None], dtype=np.int64))
        ends = numels.cumsum()
        members.copy_ragged(values, (ends * self.dtype.itemsize).astype(np.uint64))
        for row, value in by_hand.items():
            values[int(ends[row] - numels[row]) : int(ends[row])] = value.reshape(-1)

    def checked(self, value: Any) -> Any:
        """Convert a decoded value for its row: text, or an array of the schema's shape and dtype.

        Raises:
            ValueError: the value does not match the schema.
        """
        if self.dtype in (str, bytes):
            return self._text(value)
        if isinstance(value, bytes):
            if len(value) % self.dtype.itemsize:
                raise ValueError(f"{len(value)} bytes are no whole number of {self.dtype}")
            value = np.frombuffer(value, self.dtype)
            extents = [n for n in self.shape if n is not None]
            if len(extents) == len(self.shape) and value.size == np.prod(extents, dtype=np.int64):
                value = value.reshape(extents)
        array = np.asarray(value)
        if not fits(array.shape, self.shape):
            raise ValueError(f"the schema says shape {self.shape}, and it has {array.shape}")
        if array.dtype.kind == "i" and array.ndim == 0 and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            is_held = limits.min <= int(array) <= limits.max
        else:
            is_held = array.dtype.newbyteorder("=") == self.dtype.newbyteorder("=")
        if not is_held:
            shown = f"{array} " if array.ndim == 0 else ""
            raise ValueError(
                f"the schema says {self.dtype}, and it is {shown}of {array.dtype}; change the schema or convert it in decode="
            )
        return array.astype(self.dtype)

    def _text(self, value: Any) -> Any:
        if isinstance(value, bytes) and self.dtype is str:
            return value.decode()
        if isinstance(value, str) and self.dtype is bytes:
            return value.encode()
        if not isinstance(value, self.dtype):
            raise ValueError(f"the schema says {self.dtype.__name__}, and it is a {type(value).__name__}")
        return value


_MOST_ALTERNATIVES = 254  # per field, because ranks have 8 bits


class TarSamples:
    """The shards that this process has opened: all indexes, and the shards mapped so far.

    Args:
        counts: number of samples of each shard; None takes them from the indexes.
    """

    def __init__(
        self, indexes: Sequence[ShardIndex], alternatives: Sequence[Sequence[str]], counts: NDArray[np.int64] | None = None
    ) -> None:
        self.indexes = indexes
        numbers = [i.num_samples for i in indexes] if counts is None else counts
        self.starts = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int64)
        self.rows = TarRows(self.starts)
        self._begin: list[int] = self.starts.tolist()
        self._alternatives = alternatives
        self._mapped: dict[int, NDArray[np.uint8]] = {}
        self._lock = ForkLock()

    def __len__(self) -> int:
        return self._begin[-1]

    def at(self, index: int) -> tuple[int, int]:
        """Return (shard, sample within it)."""
        shard = bisect_right(self._begin, index) - 1
        return shard, index - self._begin[shard]

    def data(self, shard: int) -> NDArray[np.uint8]:
        """Return the bytes of a shard."""
        return self._mapped[shard] if shard in self._mapped else self._open(shard)

    def open_all(self, indices: NDArray[np.int64]) -> None:
        """Map the shards of these samples.

        Raises:
            ShardCorrupt: a shard has been modified since it was indexed.
        """
        while (shard := self.rows.unopened(indices)) >= 0:
            self._open(shard)
        self.check(indices)

    def check(self, indices: NDArray[np.int64]) -> None:
        """Check that the shards of these samples, all mapped, are unchanged. Call this again after everything is read.

        Raises:
            ShardCorrupt: a shard has changed.
        """
        if (shard := self.rows.changed(indices)) >= 0:
            raise changed(self.indexes[shard])

    def map(self, shard: int) -> tuple[NDArray[np.uint8], bytes | None, tuple[int, int, int, int] | None]:
        """Return (bytes of a shard, path and state of its file). Path and state may be None if the file cannot change."""
        index = self.indexes[shard]
        file = MappedFile(os.fsencode(index.path))
        if file.state[2:] != (index.nbytes, index.mtime_ns):
            raise changed(index)
        return np.frombuffer(memoryview(file), np.uint8), os.fsencode(index.path), file.state

    def _open(self, shard: int) -> NDArray[np.uint8]:
        data, path, state = self.map(shard)
        with self._lock:
            if shard not in self._mapped:
                index = self.indexes[shard]
                known = [[names.index(e) if e in names else 255 for e in index.extensions] for names in self._alternatives]
                ranks = np.array(known, np.uint8).reshape(len(self._alternatives), len(index.extensions))
                columns = (index.offsets, index.sizes, index.member_extensions, index.first, ranks)
                self.rows.open(shard, data, *columns, path, state)
                self._mapped[shard] = data
            return self._mapped[shard]


class TarDataset:
    """The samples of tar shards: dicts of decoded members by extension, and `__key__`.

    On first use, all headers are read, several shards in parallel, and an index is saved next to each shard (`x.tar.index`). After
    that, opening costs almost nothing, and any sample can be read directly. Payloads are read from the mapped file. A pickled
    dataset contains only names; every process maps the shards that it reads. Reading a shard that was modified after it was indexed
    is an error; a shard that was replaced or removed is still read as it was.

    With a `schema`, whole batches are decoded directly into their rows: .npy, numbers, raw bytes and text natively.

    Args:
        shards: paths, with braces expanded: "train-{000..099}.tar". A folder means its .tar files, sorted by name.
        fields: the contents of a sample: extensions, or names with alternatives, {"image": "jpg;png"}. The default is every member.
        schema: type and shape of each field, {"npy": ("float32", (1024,)), "cls": "int64", "txt": str}. It lists the fields, or
            some of those in `fields`. "__key__": str adds the key.
        decode: True decodes all formats that are safe, by extension; False returns bytes; an image spec ("pil", "rgb8", "torchrgb")
            decodes images, too; {extension: function} uses your own decoders.
        allow_pickle: decode pickles and files for torch.load, which can run arbitrary code.
        cache: save the indexes next to the shards.
    Raises:
        ValueError: names match no shard, or a shard is compressed (on first use).
        ShardCorrupt: a shard is not a valid tar file, or a member does not match its extension or the schema.
    Thread/process safety: any number of readers.
    Example:
        >>> import tempfile
        >>> from shmload.formats import TarDataset, TarWriter
        >>> path = f"{tempfile.mkdtemp()}/train.tar"
        >>> with TarWriter(path) as writer:
        ...     writer.write({"__key__": "a", "cls": 3, "txt": "three"})
        >>> TarDataset(path, fields={"label": "cls", "text": "txt"})[0]
        {'__key__': 'a', 'label': 3, 'text': 'three'}
    """

    def __init__(
        self,
        shards: Paths,
        *,
        fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        schema: Mapping[str, Any] | None = None,
        decode: Decode = True,
        allow_pickle: bool = False,
        cache: bool = True,
    ) -> None:
        self.paths = shard_paths(shards, reader="TarDataset", endings=(".tar",))
        self.schema = None if schema is None else dict(schema)
        self._fields = _fields(fields, self.schema)
        self._decoders = Decoders(decode, allow_pickle=allow_pickle)
        self._cache = cache
        names = list(self._fields or ())
        self._columns = [
            TarColumn.of(name, names.index(name), spec, {self._kind(e) for e in self._fields[name]})
            for name, spec in (self.schema or {}).items()
            if self._fields is not None and name != KEY
        ]
        self._has_own_decoders = isinstance(decode, Mapping) and any(c.way == "decode" for c in self._columns)
        self._held: PerProcess[TarSamples] = PerProcess(is_inherited=True)

    def __len__(self) -> int:
        return len(self._opened())

    def __getitem__(self, index: int) -> dict[str, Any]:
        samples = self._opened()
        number = checked_index(index, len(samples))
        if self.schema is not None:
            out = OneSample(self.schema)
            self._read_batch_into([number], out)
            return out.sample()
        shard, sample = samples.at(number)
        its = samples.indexes[shard]
        if self._fields is None:
            found = {e: self._decoded(shard, sample, e, e, offset, size) for e, offset, size in its.members(sample)}
        else:
            found = {name: self._value(number, name) for name in self._fields}
        return {KEY: its.key(sample), **found}

    @property
    def read_batch_into(self) -> Callable[[Sequence[int], Any], None] | None:
        """Return a function `read(indices, out)` that decodes samples into rows; None if a user-defined decoder is needed.

        See docs/own_format.md. User-defined decoders may draw random numbers, and each sample has its own generator only if samples
        are read one by one.
        """
        return None if self._has_own_decoders else self._read_batch_into

    def read_into(self, index: int, out: Any) -> None:
        """Decode one sample into its row.

        Args:
            index: index of the sample.
            out: the row, which has a place for each field of the schema.
        Raises:
            ShardCorrupt: a member does not match its extension or the schema.
        """
        self._read_batch_into([index], SingleRow(out))

    def _read_batch_into(self, indices: Sequence[int], out: Any) -> None:
        samples = self._opened()
        numbers = checked_indices(indices, len(samples))
        samples.open_all(numbers)
        for column in self._columns:
            members = samples.rows.find(numbers, column.number)
            column.read(members, out, partial(self._row, numbers, column))
        samples.check(numbers)
        if self.schema is not None and KEY in self.schema:
            places = [samples.at(number) for number in numbers.tolist()]
            out[KEY] = [samples.indexes[shard].key(sample) for shard, sample in places]

    def _row(self, numbers: NDArray[np.int64], column: TarColumn, row: int) -> Any:
        """Return a field of a sample, decoded and checked."""
        number = int(numbers[row])
        value = self._value(number, column.name)
        try:
            return column.checked(value)
        except (ValueError, TypeError) as error:
            shard, sample = self._opened().at(number)
            raise self._corrupt(shard, sample, column.name, error) from error

    def _value(self, number: int, name: str) -> Any:
        """Return a field of a sample, decoded."""
        assert self._fields is not None
        samples = self._opened()
        shard, sample = samples.at(number)
        members = {extension: (offset, size) for extension, offset, size in samples.indexes[shard].members(sample)}
        for extension in self._fields[name]:
            if extension in members:
                return self._decoded(shard, sample, name, extension, *members[extension])
        wanted, there = " or ".join(self._fields[name]), ", ".join(members)
        raise self._corrupt(shard, sample, name, ValueError(f"there is no member {wanted}, only {there}"))

    def _decoded(self, shard: int, sample: int, name: str, extension: str, offset: int, size: int) -> Any:
        data = self._bytes(shard, sample, offset, size)
        decoder = self._decoders.of(extension)
        if decoder is None:
            return data
        try:
            return decoder(data)
        except (ImportError, MemoryError):  # the member is not the cause
            raise
        except Exception as error:  # raised by a library or the user's decoder; in both cases the member is the cause
            raise self._corrupt(shard, sample, name, error, f" at byte {offset}") from error

    def _bytes(self, shard: int, sample: int, offset: int, size: int) -> bytes:
        samples = self._opened()
        whole = samples.data(shard)
        number = samples.starts[shard : shard + 1] + sample
        samples.check(number)
        found = whole[offset : offset + size].tobytes()
        samples.check(number)
        return found

    def _corrupt(self, shard: int, sample: int, name: str, error: Exception, where: str = "") -> ShardCorrupt:
        index = self._opened().indexes[shard]
        at = where or f" at byte {index.members(sample)[0][1]}"
        return ShardCorrupt(f"{index.path}: field {name!r} of sample {index.key(sample)!r}{at}: {error}")

    def _kind(self, extension: str) -> str:
        """Return the way in which members of this extension are read for a schema."""
        if self._decoders.of(extension) is None:
            return "raw"
        if not self._decoders.is_plain(extension):
            return "decode"
        last = extension.rpartition(".")[2]
        return "npy" if last == "npy" else "int" if last in INTEGERS else "str" if last in TEXTS else "decode"

    def _opened(self) -> TarSamples:
        return self._held.get(self._open)

    def _open(self) -> TarSamples:
        with ThreadPoolExecutor(min(len(self.paths), os.cpu_count() or 1), "shmload-tar-index") as pool:
            each = pool.map if len(self.paths) > 1 else map  # a single shard needs no thread
            indexes = list(each(partial(load_index, cache=self._cache), self.paths))
        return TarSamples(indexes, list((self._fields or {}).values()))

    def __repr__(self) -> str:
        count = f"{len(self)} samples" if self._held.is_open else "not indexed yet"
        return f"<TarDataset of {len(self.paths)} shards, {count}>"


def _fields(given: Any, schema: Mapping[str, Any] | None) -> dict[str, list[str]] | None:
    """Return the alternative extensions of each field; None if a sample has all its members."""
    if given is None:
        return None if schema is None else {name: [name.lower()] for name in schema if name != KEY}
    pairs = given.items() if isinstance(given, Mapping) else [(name, name) for name in names_of(given, "fields")]
    found = {
        name: [e.strip().lower() for e in (names.split(";") if isinstance(names, str) else names)]
        for name, names in pairs
        if name != KEY
    }
    for name, names in found.items():
        if not 0 < len(names) <= _MOST_ALTERNATIVES:
            raise ValueError(f"fields[{name!r}] needs 1 to {_MOST_ALTERNATIVES} extensions; got {len(names)}")
    unknown = [name for name in schema or () if name not in found and name != KEY]
    if unknown:
        raise ValueError(f"the schema names {unknown}, which fields does not; it has {list(found)}")
    return found
