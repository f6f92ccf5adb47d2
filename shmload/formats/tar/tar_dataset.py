"""TarDataset: random access to the samples of WebDataset tar shards in local files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.batch.row_placer import OneSample, SingleRow
from shmload.errors import ShardCorrupt
from shmload.formats.braces import shard_paths
from shmload.formats.field_names import names_of
from shmload.formats.images.shared_choices import one_sample
from shmload.formats.paths import Paths
from shmload.formats.per_process import PerProcess
from shmload.formats.plain_files import picture_format
from shmload.formats.row_numbers import checked_index, checked_indices
from shmload.formats.tar.decoders import Decode, Decoders
from shmload.formats.tar.extensions import INTEGERS, TEXTS
from shmload.formats.tar.opened_shards import OpenedShards
from shmload.formats.tar.shard_index import KEY, load_index
from shmload.formats.tar.tar_column import TarColumn

_MOST_ALTERNATIVES = 254  # per field, because an extension's place among them is stored in 8 bits, in which 255 means none


class TarDataset:
    """The samples of tar shards: dicts of decoded members by extension, and `__key__`.

    On first use, all headers are read, several shards in parallel, and an index is saved next to each shard (`x.tar.index`). After
    that, opening costs almost nothing, and any sample can be read directly. Payloads are read from the mapped file. A pickled
    dataset contains only names; every process maps the shards that it reads. Reading a shard that was modified after it was indexed
    is an error; a shard that was replaced or removed is still read as it was.

    With a `schema`, whole batches are decoded directly into their rows: .npy, numbers, raw bytes and text natively.

    Args:
        shards: paths, with braces and patterns expanded: "train-{000..099}.tar", "train-*.tar". A folder means its .tar files,
            sorted by name.
        fields: the contents of a sample: extensions, or names with alternatives, {"image": "jpg;png"}. The default is every member.
        schema: type and shape of each field, {"npy": ("float32", (1024,)), "cls": "int64", "txt": str}. It lists the fields, or
            some of those in `fields`. "__key__": str adds the key.
        decode: True decodes all formats that are safe, by extension; False returns bytes; an image spec ("pil", "rgb8", "torchrgb")
            decodes images, too; {extension: function} uses your own decoders.
        allow_pickle: decode pickles and files for torch.load, which can run arbitrary code.
        cache: save the indexes next to the shards.
    Raises:
        FileNotFoundError: a folder or a pattern has no shard, or a shard does not exist (on first use).
        ValueError: no shard is given, or a shard is compressed (on first use).
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
        self._held: PerProcess[OpenedShards] = PerProcess(is_inherited=True)

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
        with one_sample(self._decoders.own):
            if self._fields is None:
                found = {e: self._decoded(shard, sample, e, e, offset, size) for e, offset, size in its.members(sample)}
            else:
                found = {name: self._value(number, name) for name in self._fields}
        return {KEY: its.key(sample), **found}

    @property
    def read_batch_into(self) -> Callable[[Sequence[int], Any], None] | None:
        """Return a function `read(indices, out)` that decodes samples into rows; None if a user-defined decoder is needed.

        See docs/own_format.md for `out`. User-defined decoders may draw random numbers, and each sample has a generator of its own
        only if samples are read one by one.
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
        with one_sample(self._decoders.own if len(numbers) == 1 else ()):  # there is one if `decode` is a mapping
            for column in self._columns:
                members = samples.rows.find(numbers, column.number)
                column.read(members, out, partial(self._row, numbers, column))
        samples.check(numbers)
        if self.schema is not None and KEY in self.schema:
            places = [samples.at(number) for number in numbers.tolist()]
            out[KEY] = [samples.indexes[shard].key(sample) for shard, sample in places]

    def _row(self, numbers: NDArray[np.int64], column: TarColumn, row: int) -> Any:
        """Return a field of the sample at position `row` of `numbers`, decoded and checked."""
        number = int(numbers[row])
        value = self._value(number, column.name)
        try:
            return column.checked(value)
        except (ValueError, TypeError) as error:
            shard, sample = self._opened().at(number)
            if isinstance(value, bytes) and (kind := picture_format(value)) is not None:
                index = self._opened().indexes[shard]
                decoders = ", ".join(f"{extension!r}: ImageDecoder(...)" for extension in (self._fields or {})[column.name])
                raise ValueError(
                    f"{index.path}: field {column.name!r} of sample {index.key(sample)!r} is an encoded image, {len(value):,} "
                    f"bytes of a {kind} file; the schema says {column.dtype} of shape {column.shape}. Decode it, with "
                    f"ImageDecoder of shmload.formats: decode={{{decoders}}}"
                ) from error
            raise self._corrupt(shard, sample, column.name, error) from error

    def _value(self, number: int, name: str) -> Any:
        """Return a field of sample `number`, decoded."""
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
        """Return how members of this extension are read for a schema: "npy", "int", "raw", "str" or "decode"."""
        if self._decoders.of(extension) is None:
            return "raw"
        if not self._decoders.is_plain(extension):
            return "decode"
        last = extension.rpartition(".")[2]
        return "npy" if last == "npy" else "int" if last in INTEGERS else "str" if last in TEXTS else "decode"

    def _opened(self) -> OpenedShards:
        return self._held.get(self._open)

    def _open(self) -> OpenedShards:
        with ThreadPoolExecutor(min(len(self.paths), os.cpu_count() or 1), "shmload-tar-index") as pool:
            each = pool.map if len(self.paths) > 1 else map  # a single shard needs no thread
            indexes = list(each(partial(load_index, cache=self._cache), self.paths))
        return OpenedShards(indexes, list((self._fields or {}).values()))

    def __repr__(self) -> str:
        count = f"{len(self)} samples" if self._held.is_open else "not indexed yet"
        return f"<TarDataset of {len(self.paths)} shards, {count}>"


def _fields(given: Any, schema: Mapping[str, Any] | None) -> dict[str, list[str]] | None:
    """Return the alternative extensions of each field; None if neither fields nor schema are given: a sample has all members."""
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
