"""SharedIndex: a read-only sequence of paths, labels or rows in shared memory, which workers neither copy nor pickle.

Entries are packed into columns. The memory contains one column after another, and each part begins at a multiple of 64 bytes:

    column 0: words | data,  column 1: words | data,  ...

src/index.h describes words and data. An `IndexLayout` describes the columns. It is small and is pickled; the memory is not: other
processes of the machine map it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shmload._core.index_builder import ColumnBuilder, pack_dicts, pack_tuples
from shmload._core.index_reader import PackedRows
from shmload._core.mapping import Mapping as MappedMemory
from shmload.batch.layout import aligned
from shmload.errors import RingTooSmall
from shmload.formats.arrow.arrow_reader import check_encryption
from shmload.formats.extras import library
from shmload.processes import private_fds
from shmload.processes.run_key import run_key
from shmload.shm import pickling
from shmload.shm.free_memory import available_bytes
from shmload.shm.meeting import Meeting
from shmload.shm.names import SHM_DIR, meeting_stem, proc_self
from shmload.shm.segment import open_segment
from shmload.shm.segment_group import SegmentGroup

_SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}  # kinds that always have the same dtype


@dataclass(frozen=True)
class ColumnLayout:
    """One column.

    Attributes:
        name: key of a dict, field of a named tuple, or position in a plain tuple; 0 if entries are not rows.
        kind: "str", "bytes", "int", "float", "bool" or "array".
        dtype, shape: type and shape of one entry; dtype is "" for text.
        ends, data: offsets of the words (-1 without words) and of the values.
    """

    name: str | int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    is_nullable: bool
    ends: int
    data: int

    @property
    def type(self) -> str:
        """Return the type in the form shown to users: "str", "str | None", "int64", "float32[3, 2]"."""
        if not self.dtype:
            return f"{self.kind} | None" if self.is_nullable else self.kind
        return self.dtype + (str(list(self.shape)) if self.shape else "")

    def array(self, memory: MappedMemory, count: int) -> NDArray[Any]:
        """Return the whole column as a view of the shared memory; not for text. Shape `(count, *shape)`, read-only."""
        return np.ndarray((count, *self.shape), self.dtype, memoryview(memory), self.data)


@dataclass(frozen=True)
class IndexLayout:
    """The layout of an index.

    Attributes:
        row_type: dict, tuple or the class of a named tuple; None if entries are the values of a single column.
    """

    count: int
    columns: tuple[ColumnLayout, ...]
    row_type: type | None
    nbytes: int


_NUMERIC = "biufc"  # numpy's kinds of numeric dtypes


class Packed(NamedTuple):
    """Columns that are ready to be written, and their layout."""

    layout: IndexLayout
    builders: Sequence[ColumnBuilder]

    @classmethod
    def of(cls, builders: Sequence[ColumnBuilder], row_type: type | None) -> Packed:
        """Assign a position in memory to each column."""
        columns, end = [], 0
        for number, builder in enumerate(builders):
            has_words = builder.kind in ("str", "bytes")
            ends = end if has_words else -1
            data = aligned(end + builder.ends.nbytes)
            end = aligned(data + builder.data.nbytes)
            name = number if builder.name is None else builder.name
            dtype = "" if has_words else _SCALARS.get(builder.kind) or str(builder.dtype)
            columns.append(ColumnLayout(name, builder.kind, dtype, builder.shape, builder.is_nullable, ends, data))
        return cls(IndexLayout(builders[0].count, tuple(columns), row_type, end), builders)

    def parts(self) -> Iterator[tuple[int, Any]]:
        """Yield (offset, bytes) of all parts of the memory."""
        for column, builder in zip(self.layout.columns, self.builders, strict=True):
            yield from ((column.ends, builder.ends), (column.data, builder.data))

    def shared(self) -> IndexMemory:
        """Write the columns to shared memory. Its name is removed with the returned object or this process.

        Raises:
            MemoryError: there is not enough memory.
        """
        return IndexMemory.written(self.layout.nbytes, self.parts(), f"an index of {self.layout.count} entries")

    def digest(self) -> str:
        """Return a hash that is equal for two indexes if and only if their entries are equal."""
        digest = hashlib.blake2b(digest_size=16)
        row_type = self.layout.row_type.__qualname__ if self.layout.row_type else ""
        shape = [row_type, *((column.name, column.type, column.data) for column in self.layout.columns)]
        digest.update(repr(shape).encode("utf-8", "surrogatepass"))
        for _, part in self.parts():
            digest.update(part)
        return f"{self.layout.count} entries, {digest.hexdigest()}"


def pack_entries(entries: Iterable[Any]) -> Packed:
    """Pack values or rows. The iterable is consumed once, one entry at a time, and may be of any length.

    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored, or differs in kind from the previous ones; the message
        names it.
    """
    _refuse_tables(entries)
    if isinstance(entries, np.ndarray) and entries.ndim and entries.dtype.kind in _NUMERIC:
        return Packed.of([_column(None, entries)], None)
    iterator = iter(entries)
    for first in iterator:
        row_type = type(first) if isinstance(first, tuple) or type(first) is dict else None
        names = list(first) if row_type is dict else list(getattr(row_type, "_fields", range(len(first)))) if row_type else []
        everything = chain(iter((first,)), iterator)
        del first  # keeps no reference to the entry
        return Packed.of([_column(None, everything)], None) if row_type is None else _pack_rows(row_type, names, everything)
    return Packed.of([ColumnBuilder(None)], None)


def pack_columns(columns: Mapping[str, Any]) -> Packed:
    """Pack columns. The entries are dicts of their values. Numeric arrays keep their dtype.

    Raises:
        TypeError, ValueError, OverflowError: a value cannot be stored, or the columns differ in length.
    """
    _check_names(columns)
    builders = [_column(name, values) for name, values in columns.items()]
    if len({builder.count for builder in builders}) > 1:
        lengths = ", ".join(f"{builder.name!r} {builder.count}" for builder in builders)
        raise ValueError(f"the columns of an index have one value per entry each; got different numbers: {lengths}")
    return Packed.of(builders, dict)


def _refuse_tables(entries: Any) -> None:
    """Reject iterables that would yield something other than their entries.

    Raises:
        TypeError: the iterable is a table; the message names the method to call instead.
    """
    if isinstance(entries, (str, bytes)):
        raise TypeError(f"a {type(entries).__name__} is one entry, and an index needs many: give a list of them")
    if isinstance(entries, Mapping):
        raise TypeError("a mapping gives its keys, not its values: use SharedIndex.from_columns(mapping)")
    if hasattr(entries, "columns") and hasattr(entries, "dtypes"):
        raise TypeError("a DataFrame gives its columns' names, not its rows: use SharedIndex.from_dataframe(frame)")


def _column(name: str | None, values: Any) -> ColumnBuilder:
    builder = ColumnBuilder(name)
    if isinstance(values, np.ndarray) and values.ndim and values.dtype.kind in _NUMERIC:
        builder.extend_array(values)
    elif isinstance(values, (str, bytes)):
        raise TypeError(f"column {name!r} is one {type(values).__name__}: give a sequence with one value per entry")
    else:
        builder.extend(values)
    return builder


def _pack_rows(row_type: type, names: Sequence[str | int], rows: Iterable[Any]) -> Packed:
    """Pack tuples, named tuples or dicts."""
    builders = tuple(ColumnBuilder(name) for name in names)
    if row_type is dict:
        _check_names(names)
        pack_dicts(rows, builders, tuple(map(str, names)))
    elif row_type is not tuple and not hasattr(row_type, "_fields"):
        raise TypeError(f"entry 0: a {row_type.__name__} cannot be made again; give tuples, named tuples or dicts")
    elif not names:
        raise ValueError("entry 0: a row needs at least one value, got an empty tuple")
    else:
        pack_tuples(rows, builders, row_type)
    return Packed.of(builders, row_type)


def _check_names(names: Iterable[Any]) -> None:
    names = list(names)
    if not names:
        raise ValueError("an index of rows needs at least one column, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names of columns are str; got {name!r}, a {type(name).__name__}")


class Reference(NamedTuple):
    """Identifies an index's memory, so that another process can map it."""

    path: str
    inode: tuple[int, int]  # device and number
    nbytes: int


class ReceivedBytes(np.ndarray[Any, Any]):
    """Bytes received from another machine, with the attributes of a Mapping."""

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self.ctypes.data


class IndexMemory:
    """A mapping of an index into this process.

    Attributes:
        mapping: the bytes, read-only.
        reference: how other processes of this machine can map the memory; None if they cannot, because the bytes came from another
            machine.
    """

    def __init__(self, mapping: MappedMemory | ReceivedBytes, reference: Reference | None) -> None:
        self.mapping: Any = mapping  # code that takes a Mapping accepts both types
        self.reference = reference

    @classmethod
    def written(cls, nbytes: int, parts: Iterable[tuple[int, Any]], what: str) -> IndexMemory:
        """Create a segment and write (offset, bytes) parts to it, which may leave gaps.

        The parts are written with a system call and not through a mapping, because the kernel then neither clears pages that are
        completely overwritten nor takes page faults.

        Raises:
            MemoryError: there is not enough memory; the message contains `what`.
        """
        nbytes = max(nbytes, 1)
        group = SegmentGroup()
        try:
            segment = group.segment("control", nbytes)
            for begin, part in parts:
                written = 0
                while written < part.nbytes:  # one call writes at most 2 GiB
                    written += os.pwrite(segment.fd, part[written:], begin + written)
            # populated, so that the kernel counts pages that a worker reads as shared with this process, not as the worker's own
            mapping = MappedMemory(segment.fd, nbytes, populate=True, writable=False)
        except RingTooSmall as error:
            group.close()
            raise MemoryError(
                f"{what} needs {nbytes} bytes, and this process may take {available_bytes()} more: free memory, or hold less in it"
            ) from error
        except BaseException:
            group.close()
            raise
        status = os.fstat(segment.fd)
        memory = cls(mapping, Reference(segment.path, (status.st_dev, status.st_ino), nbytes))
        weakref.finalize(memory, group.close)
        return memory

    def ticket(self) -> Any:
        """Return the object that a pickle contains in place of the memory; `attach` accepts it."""
        return pickling.out_of_band(self.mapping) if self.reference is None or pickling.is_for_another_machine() else self.reference

    @classmethod
    def attach(cls, reference: Any, *, keeps_open: bool = False) -> IndexMemory:
        """Map an index of another process.

        Args:
            reference: its Reference, or the bytes themselves if they came from another machine.
            keeps_open: keep a file descriptor, so that others can map the memory through this process, too.
        Raises:
            FileNotFoundError: the owner has released the memory.
        """
        if not isinstance(reference, Reference):
            return cls(np.frombuffer(reference, np.uint8).view(ReceivedBytes), None)
        try:
            fd = open_segment(reference.path)
        except OSError as error:
            raise _gone(reference.path) from error
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != reference.inode:
            os.close(fd)
            raise _gone(reference.path)
        mapping = MappedMemory(fd, reference.nbytes, writable=False)
        if not keeps_open:
            os.close(fd)
            return cls(mapping, reference)
        memory = cls(mapping, reference._replace(path=f"{proc_self()}/fd/{fd}"))
        weakref.finalize(memory, _release, private_fds.keep(fd), os.getpid())
        return memory


def _release(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has closed the descriptor, and may have reused its number
        private_fds.close(fd)


def _gone(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"the index at {path} is gone: the process that made it has ended or let it go. A pickled SharedIndex or dataset only says "
        "where the memory is; keep it alive where it was made, or make it again here"
    )


Fingerprint = str | bytes | int | None


class _Board(NamedTuple):
    layout: IndexLayout
    fingerprint: Fingerprint  # given by the user
    digest: str  # hash of the entries
    ways: tuple[Reference, ...]


def share(name: str, pack: Callable[[], Packed], fingerprint: Fingerprint, *, is_packed: bool) -> tuple[IndexLayout, IndexMemory]:
    """Return the index that this run has under `name`. Build it if no process has done so yet.

    Args:
        pack: builds the index; called by one process of the node, or by each if the entries must be compared.
        fingerprint: identifies the contents: equal fingerprints are assumed to mean equal entries.
        is_packed: every process has the entries, so that they are compared if there is no fingerprint.
    Raises:
        ValueError: other processes have different entries.
        OSError: the meeting cannot be created.
    """
    group = SegmentGroup()  # starts the reaper, which cleans up the meeting if this process is killed
    meeting = Meeting(meeting_stem("index", name, *run_key()))
    try:
        with meeting.locked_board():
            text = meeting.read()
            board: _Board | None = pickle.loads(text) if text else None
            memory = _attached_to(board) if board is not None else None
            if board is None or memory is None:
                packed = pack()
                memory = packed.shared()
                board = _Board(packed.layout, fingerprint, packed.digest(), ())
            else:
                theirs: object = board.fingerprint
                mine: object = fingerprint
                if theirs is None and mine is None and is_packed:
                    theirs, mine = board.digest, pack().digest()
                if theirs != mine:
                    raise ValueError(
                        f"SharedIndex(name={name!r}): another rank of this node holds other entries under this name ({theirs}; "
                        f"here {mine}). Build it from the same entries in the same order in every rank, or give different indexes "
                        "different names"
                    )
            assert memory.reference is not None  # because it was created on this machine
            meeting.write(pickle.dumps(board._replace(ways=(*board.ways, memory.reference))))
    except BaseException as error:
        _leave(meeting, group)
        if isinstance(error, OSError) and error.filename is not None:
            error.add_note(
                f"SharedIndex(name={name!r}) meets this run's other ranks in {SHM_DIR}; without a name each rank holds its own copy"
            )
        raise
    weakref.finalize(memory, _leave, meeting, group)
    return board.layout, memory


def _attached_to(board: _Board) -> IndexMemory | None:
    for way in board.ways:
        try:
            return IndexMemory.attach(way, keeps_open=True)
        except FileNotFoundError:
            continue
    return None


def _leave(meeting: Meeting, group: SegmentGroup) -> None:
    meeting.leave()
    group.close()


Types = Mapping[str, Callable[[str], Any]]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def pack_dataframe(frame: Any) -> Packed:
    """Pack the columns of a pandas DataFrame, or of any object with `columns` and `frame[name]`.

    Raises:
        TypeError: the object has no columns, or the values of a column cannot be stored.
        ValueError: a value is missing. NaN in a column of floats counts as a value.
    """
    names = getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise TypeError(f"a DataFrame has columns; got a {type(frame).__name__}")
    names = list(names)
    if len(set(names)) < len(names):
        raise ValueError(f"the columns of an index have different names; got {names}")
    return pack_columns({name: _values(name, frame[name]) for name in names})


def pack_manifest(path: str | os.PathLike[str], types: Types | None) -> Packed:
    """Pack a .jsonl, .csv, .tsv, .txt or .parquet file; the first four may be compressed as .gz.

    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored; the message names its number and the file.
        ImportError: reading .parquet needs pyarrow.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if types and suffix not in _DELIMITERS:
        raise ValueError(f"{path}: types are for .csv and .tsv; a {suffix} file says by itself what its values are")
    try:
        if path.suffix == ".parquet":
            return _pack_parquet(path)
        if suffix not in (".jsonl", ".txt", *_DELIMITERS):
            raise ValueError(f"a manifest is .jsonl, .csv, .tsv or .txt (or any of them .gz), or .parquet; got {path.suffix!r}")
        errors = "surrogateescape" if suffix == ".txt" else "strict"  # as os.listdir returns file names that are not UTF-8
        with open(path, "rb") as begin:
            is_zipped = path.suffix == ".gz" or begin.read(2) == b"\x1f\x8b"
        opened: Any = gzip.open if is_zipped else open
        with opened(path, "rt", encoding="utf-8", errors=errors, newline="") as file:
            if suffix in _DELIMITERS:
                return pack_entries(_table(file, _DELIMITERS[suffix], types or {}))
            lines = filter(None, (line.rstrip("\r\n") for line in file))
            return pack_entries(lines if suffix == ".txt" else map(_from_json, lines, count()))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: the gzip stream is damaged or cut: {error}") from error
    except (TypeError, ValueError, OverflowError, ImportError) as error:
        # not the error's own type, whose constructor may need other arguments (UnicodeDecodeError)
        kind = next(kind for kind in (TypeError, ValueError, OverflowError, ImportError) if isinstance(error, kind))
        raise kind(f"{path}: {error}") from error


def _from_json(line: str, entry: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"entry {entry}: {error}") from error


def _table(file: Iterable[str], delimiter: str, types: Types) -> Iterator[dict[str, Any]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    names = next(reader, [])
    if not all(names) or not names or len(set(names)) < len(names):
        raise ValueError(f"the first line names the columns, each once; got {names}")
    unknown = sorted(set(types) - set(names))
    if unknown:
        raise ValueError(f"types names columns {unknown}, and the file has {names}")
    for number, values in enumerate(row for row in reader if row):
        if len(values) != len(names):
            raise ValueError(f"entry {number}: {len(values)} values in line {reader.line_num}, and {len(names)} columns {names}")
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        for name, convert in types.items():
            try:
                row[name] = convert(row[name])
            except ValueError as error:
                raise ValueError(f"entry {number}, column {name!r}: {error}") from error
        yield row


def _pack_parquet(path: Path) -> Packed:
    try:
        with library("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            _check_names(file.schema_arrow.names)
            check_encryption(str(path), file, None, "write the others into a file of their own")
            builders = [ColumnBuilder(name) for name in file.schema_arrow.names]
            for batch in file.iter_batches():
                for name, builder, column in zip(batch.schema.names, builders, batch.columns, strict=True):
                    try:
                        values = column.to_pylist()
                    except Exception as error:  # raised by Python's dates or time zones
                        raise ValueError(f"column {name!r} of {column.type}: {type(error).__name__}: {error}") from error
                    builder.extend(values)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(str(error)) from error  # pyarrow's own error about the contents of the file
    return Packed.of(builders, dict)


def _values(name: str, column: Any) -> Any:
    """Return a column's values: an array if they are numbers, otherwise an iterable."""
    dtype = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return np.asarray(column)
    if hasattr(column, "isna"):
        missing = np.flatnonzero(np.asarray(column.isna()))
        if len(missing):
            raise ValueError(
                f"column {name!r} has {len(missing)} missing values, the first in row {missing[0]}: fill or drop them before"
            )
    own = getattr(dtype, "numpy_dtype", None)  # numeric types among pandas' nullable and Arrow types
    if isinstance(own, np.dtype) and own.kind in "biuf":
        return column.to_numpy(dtype=own)
    return column


class SharedIndex(PackedRows, Sequence[Any]):
    """A read-only sequence of paths, labels or metadata rows, stored packed and only once per machine.

    A list of a million paths grows by more than 100 MB in every forked worker, because accessing an object changes its reference
    count and so copies its page. Spawned workers receive a pickled copy of the whole list. A SharedIndex creates entries when they
    are accessed, and its pickle contains only the location of the memory. The memory is freed when the last process releases it.
    Its name in /dev/shm is removed with the process that created it, even if that crashes.

    Entries are str or bytes (some may be None), int (int64), float, bool, numpy arrays of one dtype and shape, or rows of these:
    tuples, named tuples, dicts. The first entry determines the kind of all. Returned entries are equal to the originals and have
    the same type, except that numpy scalars become Python numbers, and subclasses of str and int become str and int.

    Slices are views. An index can be used as a dataset, and `copy.deepcopy` returns the same object.

    Args:
        entries: any iterable, which is consumed once and never stored as a list; or a function without arguments that returns one.
        name: processes of a run on the same node that pass the same name share one copy. The first one builds it while the others
            wait. The others' function is then not called; their iterable is packed again to compare the entries.
        fingerprint: identifies the entries of a name: a different fingerprint is an error, and equal ones skip the comparison.
    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored, or differs in kind from the previous ones; the message
        names it.
        MemoryError: there is not enough shared memory.
    Cost: about 0.1 us for an entry of one str.
    Example:
        >>> index = SharedIndex([("a.jpg", 3), ("b.jpg", 5)])
        >>> index[1], len(index), index.column(1).sum().item()
        (('b.jpg', 5), 2, 8)
    """

    _memory: IndexMemory
    _layout: IndexLayout
    _rows: range

    def __init__(
        self, entries: Iterable[Any] | Callable[[], Iterable[Any]], *, name: str | None = None, fingerprint: Fingerprint = None
    ) -> None:
        if isinstance(entries, Iterable):
            self._build(lambda: pack_entries(entries), name, fingerprint, is_packed=True)
        elif callable(entries):
            self._build(lambda: pack_entries(entries()), name, fingerprint, is_packed=False)
        else:
            raise TypeError(f"an index needs an iterable of entries, or a function that gives one; got {type(entries).__name__}")

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, name: str | None = None, fingerprint: Fingerprint = None) -> Self:
        """Create an index of dicts from one sequence or array per key.

        Args:
            columns: a sequence or array for each name, all of the same length. Numeric arrays keep their dtype.
            name, fingerprint: as for the class.
        Raises:
            ValueError: the columns differ in length.
        """
        return cls.__new__(cls)._build(lambda: pack_columns(columns), name, fingerprint, is_packed=True)

    @classmethod
    def from_dataframe(cls, frame: Any, *, name: str | None = None, fingerprint: Fingerprint = None) -> Self:
        """Create an index of dicts from the columns of a DataFrame. Row labels are dropped.

        Args:
            frame: a pandas DataFrame, or any object with `columns` and `frame[name]`. Categories are stored as their values.
            name, fingerprint: as for the class.
        Raises:
            ValueError: a value is missing. NaN in a column of floats counts as a value.
        """
        return cls.__new__(cls)._build(lambda: pack_dataframe(frame), name, fingerprint, is_packed=True)

    @classmethod
    def from_manifest(
        cls, path: str | os.PathLike[str], *, types: Types | None = None, name: str | None = None, fingerprint: Fingerprint = None
    ) -> Self:
        """Create an index from the entries of a file, read row by row.

        Args:
            path: .jsonl (one value per line), .csv or .tsv (the first line names the columns), .txt (one str per line), each
                optionally .gz; or .parquet, with pyarrow. Empty lines are skipped.
            types: converters for columns of .csv and .tsv that are not str: {"label": int}.
            name: as for the class.
            fingerprint: as for the class; with a name, the default is the file's path, size and modification time.
        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: a line is not a valid row; the message names it.
        """
        if name is not None and fingerprint is None:
            status = os.stat(path)
            fingerprint = f"{os.path.abspath(path)}, {status.st_size} bytes, {status.st_mtime_ns} ns"
        return cls.__new__(cls)._build(lambda: pack_manifest(path, types), name, fingerprint, is_packed=False)

    @property
    def columns(self) -> dict[str | int, str]:
        """Return the types by name: keys of dicts, fields of named tuples, positions in tuples; 0 if entries are not rows."""
        return {column.name: column.type for column in self._layout.columns}

    @property
    def nbytes(self) -> int:
        """Return the size of the shared memory in bytes; the same for a slice."""
        return int(self._memory.mapping.nbytes)

    def column(self, name: str | int) -> Any:
        """Return one column: a read-only view of the shared memory for numbers, or an index for str or bytes.

        Args:
            name: a key of `columns`.
        Returns:
            An array or an index, which keeps the memory alive.
        Raises:
            KeyError: the index has no such column.
        """
        found = next((column for column in self._layout.columns if column.name == name), None)
        if found is None:
            raise KeyError(f"no column {name!r}; there are {list(self.columns)}")
        if found.dtype:
            array: NDArray[Any] = found.array(self._memory.mapping, self._layout.count)
            return array[_slice_of(self._rows)]
        layout = IndexLayout(self._layout.count, (found,), None, self._layout.nbytes)
        return SharedIndex.__new__(SharedIndex)._show(self._memory, layout, self._rows)

    def _build(self, pack: Callable[[], Packed], name: str | None, fingerprint: Fingerprint, *, is_packed: bool) -> Self:
        if name is not None:
            layout, memory = share(name, pack, fingerprint, is_packed=is_packed)
        else:
            packed = pack()
            layout, memory = packed.layout, packed.shared()
        return self._show(memory, layout, range(layout.count))

    def _show(self, memory: IndexMemory, layout: IndexLayout, rows: range) -> Self:
        self._memory, self._layout, self._rows = memory, layout, rows
        is_tuple = layout.row_type is not None and issubclass(layout.row_type, tuple)
        self._bind(
            memory.mapping,
            [(column.kind, column.ends, column.data) for column in layout.columns],
            names=tuple(str(column.name) for column in layout.columns) if layout.row_type is dict else None,
            row_type=layout.row_type if is_tuple else None,
            arrays=tuple(
                column.array(memory.mapping, layout.count) if column.kind == "array" else None for column in layout.columns
            ),
            rows=rows,
        )
        return self

    def _slice(self, item: slice) -> SharedIndex:
        return type(self).__new__(type(self))._show(self._memory, self._layout, self._rows[item])

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._memory.ticket(), self._layout, self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        row_type = self._layout.row_type
        kind = self._layout.columns[0].type if row_type is None else f"{row_type.__name__}({shown})"
        return f"<{type(self).__name__} of {len(self)} entries, {kind}, {self.nbytes} bytes shared>"


def _attached(cls: type[SharedIndex], reference: Any, layout: IndexLayout, rows: range) -> SharedIndex:
    return cls.__new__(cls)._show(IndexMemory.attach(reference), layout, rows)


def _slice_of(rows: range) -> slice:
    """Return the slice that selects these rows of an array. A negative stop would count from the end."""
    if not rows:
        return slice(0, 0)
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)
