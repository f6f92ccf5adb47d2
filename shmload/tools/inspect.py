"""What a path begins with (`Head`), what there is to say of it (`Summary`), and how values and types are put in words.

The formats that `shmload inspect` and `shmload index` know: how each is recognised, what there is to say of it, its index.

The table `FORMATS` stands at the end, in the order in which formats are asked. A new one is a `matches` function, a `describe`
function and, if its index lies beside it, an `index` function; and a line there. A format whose reader gives a schema needs no
more than `_of_schema`. Folders that programs of shmload write, packed datasets and growing caches, are known by the files in them
and asked first.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import example_features, record_starts
from shmload.errors import ShardCorrupt
from shmload.formats import tokens
from shmload.formats.arrays import ArrayDataset
from shmload.formats.columns import ZARR_FILES, HDF5Dataset, ParquetDataset, SafetensorsDataset, ZarrDataset
from shmload.formats.compression import compression_of, expanded_file, packing_of
from shmload.formats.paths import is_hidden
from shmload.formats.tar.shards import KEY, TarDataset, load_index
from shmload.formats.tar.shards import SUFFIX as TAR_SUFFIX
from shmload.formats.tfrecord import SUFFIX, RecordFile
from shmload.growing.cache_file import CONTROL
from shmload.tools import readable

PEEK = 1536  # bytes: three blocks of a tar file
_NAMES = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}


@dataclass(frozen=True)
class Head:
    """What a path begins with.

    Attributes:
        begin: its first bytes, expanded where it is compressed as a whole; none of a folder.
        compression: "gzip", "bzip2", "xz", "zstd", "zlib", or none.
        nbytes: of the file as it lies there.
    """

    path: Path
    begin: bytes
    compression: str = ""
    nbytes: int = 0
    is_folder: bool = False


def head_of(path: Path) -> Head:
    """Looks at a path.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path}: the folder is empty")
        return Head(path, b"", is_folder=True)
    found = os.stat(path)
    nbytes = found.st_size
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is a pipe, a device or a socket, and not a file")
    if not nbytes:
        raise ValueError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        begin = file.read(PEEK)
    if kind := compression_of(begin):
        try:
            with open(path, "rb") as file:
                return Head(path, expanded_file(kind, file).read(PEEK), _NAMES[kind], nbytes)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}, offset 0: {error}") from error
    if begin[0] == 0x78 and int.from_bytes(begin[:2], "big") % 31 == 0:  # a zlib stream, perhaps
        try:
            return Head(path, zlib.decompressobj().decompress(begin, PEEK), "zlib", nbytes)
        except zlib.error:
            pass
    return Head(path, begin, "", nbytes)


SHOWN = 6  # values of an array
SHOWN_CHARACTERS = 60  # of text


@dataclass(frozen=True)
class Sizes:
    """Bytes of samples."""

    min: int
    median: int
    max: int
    num_samples: int  # that were looked at

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Sizes | None:
        """Of some sizes; None if there are none."""
        found = np.asarray(sizes if isinstance(sizes, np.ndarray) else list(sizes), np.int64)
        if not len(found):
            return None
        return cls(int(found.min()), int(np.median(found)), int(found.max()), len(found))


@dataclass
class Summary:
    """One path.

    Attributes:
        fields: name -> what it holds, in words: "float32 (28, 28)".
        samples: the first ones, whole.
        notes: what else is worth knowing.
    """

    path: str
    format: str
    nbytes: int
    num_samples: int
    fields: dict[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    samples: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, with shortened samples."""
        plain = {**vars(self), "sample_nbytes": self.sizes and asdict(self.sizes)}
        del plain["sizes"]
        plain["samples"] = [{name: shortened(value) for name, value in sample.items()} for sample in self.samples]
        return plain


def shortened(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes: {bytes(value[:8]).hex(' ')}{' ...' if len(value) > 8 else ''}"
    if hasattr(value, "detach"):  # a tensor of a type that numpy lacks
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: {_numbers(value.detach().float().numpy())}"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} {value.shape}: {_numbers(value)}"
    if isinstance(value, (np.generic, np.ndarray)):
        return str(value.item())
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def described(spec: Any) -> str:
    """A schema's field in words."""
    if not isinstance(spec, tuple):
        return spec.__name__ if isinstance(spec, type) else str(spec)
    dtype, shape = described(spec[0]), spec[1]
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    return f"{dtype} ({extents}{',' if len(shape) == 1 else ''})" if shape else str(dtype)


def nbytes_of(sample: Mapping[str, Any]) -> int:
    """Bytes of the values of a sample."""
    total = 0
    for value in sample.values():
        held = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        total += held.nbytes if hasattr(held, "nbytes") else len(held) if hasattr(held, "__len__") else 8
    return total


def _numbers(array: Any) -> str:
    flat = array.reshape(-1)
    shown = " ".join(f"{number:.4g}" if array.dtype.kind == "f" else str(number) for number in flat[:SHOWN].tolist())
    return shown + (" ..." if flat.size > SHOWN else "")


SIZED = 1000  # samples whose size is looked at where that means to read them


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        matches: whether a path begins as this format does.
        describe: everything about it, with so many first samples.
        suffix: of the index beside a path; none: its samples are found without one.
        index: makes it, where there is none that fits, and returns the number of samples.
    """

    name: str
    matches: Callable[[Head], bool]
    describe: Callable[[Head, int], Summary]
    suffix: str = ""
    index: Callable[[str], int] = len


def recognise(path: Path) -> tuple[Format, Head]:
    """The format of a path.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty, or none of the formats.
    """
    head = head_of(path)
    for format in FORMATS:
        if format.matches(head):
            return format, head
    known = ", ".join(format.name for format in FORMATS)
    inside = f"what is compressed by {head.compression} in it" if head.compression else "it"
    raise ValueError(f"{path}: {inside} is of no known format ({known})")


def describe(path: Path, *, num_samples: int = 3) -> Summary:
    """Everything about a path, with its first samples: a file, a folder of samples, a packed dataset or a growing cache.

    Raises:
        OSError, ValueError: it cannot be read, is of no known format, or damaged; the message names it.
    """
    if (manifest := _manifest_at(path)) is not None:
        return _packed(manifest, num_samples)
    if (path / CONTROL).is_dir():
        return _cache(path)
    format, head = recognise(path)
    return format.describe(head, num_samples)


def index(path: Path) -> tuple[str, bool]:
    """Makes the index beside a path.

    Returns:
        what became of it, and whether it was wanted and could not be kept.
    Raises:
        OSError, ValueError: as `describe`.
    """
    began = perf_counter()
    format, head = recognise(path)
    none = f"{path}: no index was written:"
    if not format.suffix:
        return f"{none} {format.name} needs no index: its samples are found without", False
    if head.compression and format.name == "TFRecord":
        return f"{none} {path} is compressed: it is inflated when it is opened, and needs no index beside it", False
    beside = Path(f"{path}{format.suffix}")
    before = _stamp(beside)
    num_samples = format.index(os.path.abspath(path))
    after = _stamp(beside)
    if not after or (after == before and after[1] < path.stat().st_mtime_ns):
        return f"{none} {_refusal(path.parent)}", True
    there = " (it was there, and fits)" if after == before else ""
    return f"{beside}: {num_samples:,} samples, {readable(beside.stat().st_size)}, {perf_counter() - began:.2f} s{there}", False


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells one file at a path from the next; nothing if there is none."""
    if not path.exists():
        return ()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _refusal(folder: Path) -> str:
    """Why nothing can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return f"{folder} did not take it; is the disk full?"
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror or error}"


# ------------------------------------------------------------ readers that give a schema


def _of_schema(name: str, matches: Callable[[Head], bool], open: Callable[[Path], Any]) -> Format:
    """A format of columns or arrays. Rows of one shape are all of one size; else those at the beginning are looked at."""

    def describe(head: Head, num_samples: int) -> Summary:
        try:
            dataset = open(head.path)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error) if str(head.path) in str(error) else f"{head.path}: {error}") from error
        count, schema = len(dataset), dataset.schema
        is_fixed = all(isinstance(spec, tuple) and None not in spec[1] for spec in schema.values())
        samples = [dataset[i] for i in range(min(count, num_samples))]
        sizes = Sizes.of(nbytes_of(dataset[i]) for i in range(min(count, 1 if is_fixed else SIZED)))
        if sizes is not None and is_fixed:
            sizes = replace(sizes, num_samples=count)
        fields = {field: described(spec) for field, spec in schema.items()}
        found = Summary(str(head.path), name, _nbytes_at(head), count, fields, sizes, samples)
        if isinstance(dataset, ParquetDataset):
            found.notes.append(f"{len(dataset.block_starts) - 1} row groups of up to {dataset.block_size:,} rows")
        return found

    return Format(name, matches, describe)


def _begins(magic: bytes) -> Callable[[Head], bool]:
    return lambda head: not head.compression and head.begin.startswith(magic)


def _is_hdf5(head: Head) -> bool:
    """Its magic stands at the beginning, or behind a user block, whose size is a power of two."""
    if head.is_folder or head.compression:
        return False
    with open(head.path, "rb") as file:
        for at in (0, *(1 << bits for bits in range(9, head.nbytes.bit_length()))):
            file.seek(at)
            if file.read(8) == b"\x89HDF\r\n\x1a\n":
                return True
    return False


def _is_safetensors(head: Head) -> bool:
    nbytes = int.from_bytes(head.begin[:8], "little")  # of its header: up to 100 MB, by the format's own rule
    return not head.compression and head.begin[8:9] == b"{" and 2 <= nbytes <= 100_000_000


def _is_zarr(head: Head) -> bool:
    return head.is_folder and any((head.path / name).is_file() for name in ZARR_FILES)


def _nbytes_at(head: Head) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not head.is_folder:
        return head.nbytes
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(head.path) for name in names)


# ------------------------------------------------------------ WebDataset tar shards, plain or compressed

_BLOCK = 512
_VALUES_SEEN = 8  # samples whose values tell what an extension holds


def _is_tar(head: Head) -> bool:
    block = head.begin[:_BLOCK]
    if len(block) < _BLOCK or head.compression == "zlib":
        return False
    if not any(block):  # an archive without members: its end marker
        return not any(head.begin[: 2 * _BLOCK]) and len(head.begin) >= 2 * _BLOCK
    try:
        checksum = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return checksum == sum(block) - sum(block[148:156]) + 8 * 32


def _describe_tar(head: Head, num_samples: int) -> Summary:
    notes, nbytes, counts = [], [], Counter[str]()
    opened: Any = TarDataset(head.path, cache=False)
    if head.compression:
        from shmload.formats.tar.stream import TarStream  # which brings torch

        notes = [f"compressed by {head.compression}: it can only be read in order, by TarStream"]
        opened = TarStream(head.path, rank=0, world_size=1)
        for sample in TarStream(head.path, decode=False, rank=0, world_size=1):
            members = {name: value for name, value in sample.items() if name != KEY}
            counts.update(list(members))
            nbytes.append(nbytes_of(members))
    else:  # by the index alone, of all
        index = opened._opened().indexes[0]
        numbers = np.bincount(index.member_extensions, minlength=len(index.extensions))
        counts.update(dict(zip(index.extensions, numbers.tolist(), strict=True)))
        ends = np.cumsum(np.append(np.uint64(0), index.sizes))
        nbytes = np.diff(ends[index.first]).tolist()
    samples = list(islice(opened, max(num_samples, _VALUES_SEEN)))
    fields = _fields(samples, counts, len(nbytes))
    return Summary(str(head.path), "tar", head.nbytes, len(nbytes), fields, Sizes.of(nbytes), samples[:num_samples], notes)


def _fields(samples: Sequence[Mapping[str, Any]], counts: Mapping[str, int], num_seen: int) -> dict[str, str]:
    """What values samples have: types, shapes from the least to the largest, and how many of those seen have them at all."""
    found = {}
    for name, num in counts.items():
        shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for value in (sample[name] for sample in samples if name in sample):
            kind = str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
            shapes[kind].add(tuple(getattr(value, "shape", ())))
        words = []
        for kind, several in sorted(shapes.items()):
            # by the side of rows, one value alone is a row of one
            rows = {shape or (1,) for shape in several} if any(map(len, several)) else several
            axes = [
                f"{min(axis)}" if min(axis) == max(axis) else f"{min(axis)} to {max(axis)}" for axis in zip(*rows, strict=False)
            ]
            words.append(f"{kind} ({', '.join(axes)}{',' if len(axes) == 1 else ''})" if axes else kind)
        found[name] = (" or ".join(words) or "?") + (f", in {num:,} of {num_seen:,}" if num < num_seen else "")
    return found


# ------------------------------------------------------------ TFRecord files, plain or compressed

_RECORDS_SEEN = 100  # records whose features are listed
_INFLATED_MAX = 1 << 34


def _is_tfrecord(head: Head) -> bool:
    if head.compression not in ("", "gzip", "zlib") or len(head.begin) < 12:
        return False
    return masked(crc32c(head.begin[:8])) == int.from_bytes(head.begin[8:12], "little")


def _describe_tfrecord(head: Head, num_samples: int) -> Summary:
    data: Any = RecordFile(os.path.abspath(head.path), "auto", _INFLATED_MAX).data
    text, problem, at = record_starts(data)
    starts = np.frombuffer(text, np.int64)
    count = len(starts) - 1
    if problem:
        raise ShardCorrupt(f"{head.path}: record {count}, which starts at byte {at}: truncated or damaged ({problem})")
    records = []
    for number in range(min(count, max(_RECORDS_SEEN, num_samples))):
        start, end = int(starts[number]), int(starts[number + 1])
        records.append(record := bytes(data[start + 12 : end - 4]))
        if masked(crc32c(record)) != int.from_bytes(data[end - 4 : end], "little"):
            place = f"{head.path}: record {number}, which starts at byte {start}"
            raise ShardCorrupt(f"{place}: the checksum of its data differs")
    notes = []
    samples = [sample_of(record) for record in records]
    if samples and not any("bin" in sample for sample in samples):
        notes.append(f"records are tf.train.Example: fields are those of the first {len(samples)}")
    if head.compression:
        notes.append(f"compressed by {head.compression}: {len(data):,} bytes, inflated by each process that opens it")
    fields = _fields(samples, Counter(name for sample in samples for name in sample), len(samples))
    return Summary(
        str(head.path), "TFRecord", head.nbytes, count, fields, Sizes.of(np.diff(starts) - 16), samples[:num_samples], notes
    )


def sample_of(record: bytes) -> dict[str, Any]:
    """A record's features by name: the one value; else all, of bytes a list. What is no Example is bytes, named "bin"."""
    features = features_of(record)
    if features is None:
        return {"bin": record}
    return {name: values[0] if len(values) == 1 else values for name, values in features.items()}


def features_of(record: bytes) -> dict[str, Any] | None:
    """Return a tf.train.Example's values by name: bytes in a list, float32 or int64 arrays. None if the record is no Example."""
    try:
        return example_features(record) or None
    except ValueError:
        return None


# ------------------------------------------------------------ JSON lines, plain or compressed


def is_lines(name: str) -> bool:
    """Return whether a name says JSON lines, compressed or not. The bytes of text do not tell."""
    return packing_of(name.lower())[0].endswith((".jsonl", ".ndjson"))


def _is_lines(head: Head) -> bool:
    return not head.is_folder and head.compression != "zlib" and is_lines(head.path.name)


def _describe_lines(head: Head, num_samples: int) -> Summary:
    nbytes, seen, at = list[int](), list[dict[str, Any]](), 0
    kinds = {name: kind for kind, name in _NAMES.items()}
    with open(head.path, "rb") as raw:
        try:
            for line in expanded_file(kinds[head.compression], raw) if head.compression else raw:
                if line.strip():
                    nbytes.append(len(line))
                    if len(seen) < max(_RECORDS_SEEN, num_samples):
                        value = json.loads(line)
                        seen.append(value if isinstance(value, dict) else {"value": value})
                at += len(line)
        except ValueError as error:
            raise ShardCorrupt(f"{head.path}: line {len(nbytes)} with a sample, at byte {at}: {error}") from error
    fields = _fields(seen, Counter(name for sample in seen for name in sample), len(seen))
    notes = [f"compressed by {head.compression}: {at:,} bytes"] if head.compression else []
    return Summary(str(head.path), "JSON lines", head.nbytes, len(nbytes), fields, Sizes.of(nbytes), seen[:num_samples], notes)


# ------------------------------------------------------------ folders of pictures, a class a subfolder perhaps; and single pictures

_PICTURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}


def picture_format(begin: bytes) -> str | None:
    """What picture format some bytes begin as."""
    if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP":
        return "WebP"
    return next((kind for magic, kind in _PICTURES.items() if begin.startswith(magic)), None)


def _has_pictures(head: Head) -> bool:
    if head.compression:
        return False
    if head.is_folder:
        return next(_pictures_below(head.path), None) is not None
    return head.begin[:2] != b"BM" and picture_format(head.begin) is not None  # two bytes prove nothing outside a folder


def _pictures_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, format) of the pictures below a folder, in the order of their names. Hidden files are ignored."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            if is_hidden(str(path.relative_to(folder))):
                continue
            with open(path, "rb") as file:
                kind = picture_format(file.read(16))
            if kind is not None:
                yield path, kind


def _describe_pictures(head: Head, num_samples: int) -> Summary:
    root = head.path if head.is_folder else head.path.parent
    found = list(_pictures_below(root)) if head.is_folder else [(head.path, picture_format(head.begin) or "")]
    paths = [path for path, _ in found]
    names = [path.relative_to(root) for path in paths]
    fields = {"image": "uint8 (any, any, 3)"}
    if classes := sorted({name.parts[0] for name in names if len(name.parts) > 1}):
        fields["label"] = f"int64: {len(classes)} folders, {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}"
    shapes = [_of_picture(path, lambda image: (*image.size, image.mode)) for path in paths[:SIZED]]
    widths, heights, modes = zip(*shapes, strict=True)
    notes = [
        ", ".join(f"{count:,} {kind}" for kind, count in Counter(kind for _, kind in found).most_common()),
        f"widths {min(widths)} to {max(widths)}, heights {min(heights)} to {max(heights)}, "
        + ", ".join(f"{mode} ({count:,})" for mode, count in Counter(modes).most_common())
        + (f", of the first {SIZED:,}" if len(paths) > SIZED else ""),
    ]
    nbytes = [path.stat().st_size for path in paths]
    samples = [
        {"name": str(name), "image": _of_picture(path, lambda image: np.asarray(image.convert("RGB")))}
        for name, path in zip(names, paths[:num_samples], strict=False)
    ]
    return Summary(str(head.path), "images", sum(nbytes), len(paths), fields, Sizes.of(nbytes), samples, notes)


def _of_picture(path: Path, what: Callable[[Any], Any]) -> Any:
    """Something of a picture; its size and mode stand in the header, and nothing is decoded for them."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return what(image)
    except Exception as error:  # Pillow's many decoders fail in ways of their own
        raise ValueError(f"{path}: the picture is damaged: {error}") from error


# ------------------------------------------------------------ tokens: a Megatron pair


def _is_tokens(head: Head) -> bool:
    if head.is_folder or head.compression:
        return False
    if head.begin.startswith(tokens.MAGIC):
        return True
    beside = head.path.with_suffix(".idx")
    if head.path.suffix != ".bin" or not beside.is_file():
        return False
    with open(beside, "rb") as file:
        return file.read(len(tokens.MAGIC)) == tokens.MAGIC


def _describe_megatron(head: Head, num_samples: int) -> Summary:
    """Its documents are the samples."""
    idx, bin = head.path.with_suffix(".idx"), head.path.with_suffix(".bin")
    if head.begin.startswith(tokens.MAGIC):
        idx = head.path  # whatever it is called
    name, offsets = tokens.read_index(idx)
    dtype, nbytes, num = np.dtype(name), os.path.getsize(bin), int(offsets[-1])
    if num * dtype.itemsize != nbytes:
        raise ShardCorrupt(f"{idx}: its {num:,} tokens of {dtype} do not make the {nbytes:,} bytes of {bin}")
    count = len(offsets) - 1
    every = np.memmap(bin, dtype, "r") if nbytes else np.empty(0, dtype)
    return Summary(
        str(head.path),
        "tokens, Megatron",
        nbytes + os.path.getsize(idx),
        count,
        {"tokens": f"{dtype} (any,)"},
        Sizes.of(np.diff(offsets) * dtype.itemsize),
        [{"tokens": np.array(every[offsets[i] : offsets[i + 1]])} for i in range(min(num_samples, count))],
        [f"{num:,} tokens in {count:,} documents, which are the samples here"],
    )


# ------------------------------------------------------------ what shmload's own programs write


def _manifest_at(path: Path) -> Path | None:
    """The manifest of a packed dataset that a path is, or has in it."""
    from shmload.remote.manifest import FORMAT, MANIFEST_NAME

    if path.is_dir():
        path = path / MANIFEST_NAME
    if path.name != MANIFEST_NAME or not path.is_file():
        return None
    with open(path, "rb") as file:
        return path if FORMAT.encode() in file.read(64) else None


def _packed(path: Path, num_samples: int) -> Summary:
    """All that a manifest says, and the first samples of its first shard."""
    from shmload.remote.manifest import Manifest

    manifest = Manifest.parse(path.read_bytes(), name=str(path))
    notes = [f"generation {manifest.generation}, packed in the order of seed {manifest.seed}"]
    found = Summary(str(path), "packed shards", manifest.nbytes, manifest.num_samples, notes=notes)
    if manifest.shards:
        largest = max(shard.nbytes for shard in manifest.shards)
        notes.insert(0, f"{len(manifest.shards):,} shards of at most {largest:,} bytes, each with its index beside it")
        first = describe(path.parent / manifest.shards[0].name, num_samples=num_samples)
        found.fields, found.sizes, found.samples = first.fields, first.sizes, first.samples
    for name in manifest.extensions:
        found.fields.setdefault(name, "in other shards")
    return found


def _cache(path: Path) -> Summary:
    """How full a growing cache is, how old, how fast, and what its writers do: one fact a line."""
    from shmload.growing.sample_cache import SampleCache

    stats = SampleCache.look(path)
    share = stats.nbytes / stats.capacity_bytes
    notes = [
        f"{share:.0%} of its budget of {stats.capacity_bytes:,} bytes: {stats.num_files} files, {stats.num_writing} being written, "
        f"{stats.num_leased} read by epochs under way",
        f"generation {stats.generation}: so many files were published, {stats.num_evicted} of them are gone",
        f"in the last minute {stats.bytes_per_s / 1e6:.1f} MB/s, {stats.samples_per_s:.1f} samples/s were published",
    ]
    for sampler in stats.samplers:
        who = f"sampler {sampler['worker_id']} of process {sampler['trainer']}"
        error = sampler["error"].strip().splitlines()
        notes.append(f"{who}: {sampler['state']}, {sampler['restarts']} restarts" + (f"; {error[-1]}" if error else ""))
    for writer in stats.writers:
        does = "waits for room" if writer.is_waiting else "writes"
        has = f"{writer.num_records:,} samples in {writer.num_files} files, {writer.waited_s:.1f} s waited"
        notes.append(f"process {writer.pid} ({writer.role}) {does}: {has}")
    notes += [f"left out: {name}: {why}" for name, why in stats.bad.items()]
    return Summary(str(path), "growing cache", stats.nbytes, stats.num_samples, notes=notes)


FORMATS = (
    _of_schema("npy", _begins(b"\x93NUMPY"), lambda path: ArrayDataset({"data": str(path)})),
    _of_schema("Parquet", _begins(b"PAR1"), ParquetDataset),
    _of_schema("HDF5", _is_hdf5, HDF5Dataset),
    _of_schema("safetensors", _is_safetensors, SafetensorsDataset),
    _of_schema("Zarr", _is_zarr, ZarrDataset),
    Format("tar", _is_tar, _describe_tar, TAR_SUFFIX, lambda path: load_index(path).num_samples),
    Format(
        "TFRecord",
        _is_tfrecord,
        _describe_tfrecord,
        SUFFIX,
        lambda path: len(RecordFile(path, "auto", _INFLATED_MAX).offsets()) - 1,
    ),
    Format("JSON lines", _is_lines, _describe_lines),
    Format("images", _has_pictures, _describe_pictures),
    Format("tokens", _is_tokens, _describe_megatron),
)
