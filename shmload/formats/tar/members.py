"""Encode and decode the members of tar files by the last part of their extension, as webdataset does.

A member with an unknown extension stays bytes. Formats that can run code (pickle, torch.load) are decoded only on request. No
payload causes more memory to be allocated than it needs: an .npy header is compared with the bytes after it, and the decompressed
size of gzip and npz is limited. When encoding, bytes and str are written unchanged.

Images are decoded according to webdataset's specs: Pillow images, numpy arrays (HWC) or torch tensors (CHW).

    [torch|pil] l|rgb|rgba [8]        with 8: uint8, else float32 from 0 to 1; "torch" and "pil" alone mean RGB

Tenbin is webdataset's format for a list of arrays. Each array is a header chunk and a data chunk, all at multiples of 64 bytes:

    "~TenBin~" | int64 number of bytes | the bytes, padded to 64           a chunk
    type, name (8 characters each) | int64 dimensions | int64 extents      the bytes of a header chunk

Source: webdataset 1.0.2, its autodecode module. It encodes class, count, msgpack, tenbin and html but does not decode them; they
are decoded here.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import math
import operator
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.formats.compression import expanded_pieces, zstd_pieces
from shmload.formats.inflate import inflated
from shmload.formats.npy_header import npy_head_of

_NAMES = """
blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx j2c
icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda
vst webp wmf emf xbm xpm
"""
IMAGE_EXTENSIONS = frozenset(_NAMES.split())
_SPEC = re.compile(r"(torch|pil)?(l|rgb|rgba)?(8)?")


def image_decoder(spec: str) -> Callable[[bytes], Any]:
    """Return the decoder of images for one of webdataset's specs, such as "torchrgb8".

    Raises:
        ValueError: the spec is invalid.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or not (match[1] or match[2]) or (match[3] and (match[1] == "pil" or not match[2])):
        raise ValueError(
            f"decode={spec!r}: not an image spec, which are [torch]l|rgb|rgba with or without 8, torch, pil, pill, pilrgb, pilrgba"
        )
    return partial(_decode_image, match[1] or "", (match[2] or "rgb").upper(), bool(match[3]))


def _decode_image(kind: str, mode: str, is_uint8: bool, data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("decoding images needs Pillow: pip install 'shmload[images]'") from error
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert(mode)
    if kind == "pil":
        return picture
    array = np.array(picture)  # (height, width[, channels])
    if not is_uint8:
        array = array.astype(np.float32) / np.float32(255)
    if not kind:
        return array
    import torch

    tensor = torch.from_numpy(array)
    return tensor.permute(2, 0, 1).contiguous() if array.ndim == 3 else tensor


_MAGIC = b"~TenBin~"
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


def decode_tenbin(data: bytes) -> list[NDArray[Any]]:
    """Decode a list of arrays.

    Raises:
        ValueError: the bytes are not valid tenbin.
    """
    chunks = list(_chunks(data))
    if len(chunks) % 2:
        raise ValueError(f"tenbin needs a header and data for each array; got {len(chunks)} chunks")
    return [_array(head, body) for head, body in zip(chunks[::2], chunks[1::2], strict=True)]


def encode_tenbin(arrays: Sequence[Any]) -> bytes:
    """Encode a list of arrays.

    Raises:
        ValueError: tenbin does not support the dtype.
    """
    found = []
    for given in arrays:
        array = np.ascontiguousarray(given).reshape(np.shape(given))
        name = array.dtype.newbyteorder("<").str[1:]
        if name not in _TYPES:
            raise ValueError(f"tenbin holds arrays of {', '.join(_TYPES)}; got {array.dtype}")
        head = struct.pack(f"<8s8sq{array.ndim}q", name.encode(), b"", array.ndim, *array.shape)
        found += [_chunk(head), _chunk(array.astype(array.dtype.newbyteorder("<")).tobytes())]
    return b"".join(found)


def _chunk(data: bytes) -> bytes:
    return _MAGIC + struct.pack("<q", len(data)) + data + bytes(-len(data) % 64)


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if data[at : at + 8] != _MAGIC or len(data) - at < 16:
            raise ValueError(f"tenbin has no chunk at {at}")
        (nbytes,) = struct.unpack_from("<q", data, at + 8)
        if not 0 <= nbytes <= len(data) - at - 16:
            raise ValueError(f"tenbin's chunk at {at} says {nbytes} bytes, and {len(data) - at - 16} are left")
        yield data[at + 16 : at + 16 + nbytes]
        at += 16 + -(-nbytes // 64) * 64


def _array(head: bytes, body: bytes) -> NDArray[Any]:
    if len(head) < 24:
        raise ValueError(f"tenbin's header has at least 24 bytes; got {len(head)}")
    name = head[:8].rstrip(b"\0 ").decode("ascii", "replace")
    (ndim,) = struct.unpack_from("<q", head, 16)
    if name not in _TYPES or not 0 <= ndim <= 32 or len(head) != 24 + 8 * ndim:
        raise ValueError(f"tenbin's header is broken: type {name!r}, {ndim} dimensions, {len(head)} bytes")
    shape = struct.unpack_from(f"<{ndim}q", head, 24)
    if min(shape, default=0) < 0 or math.prod(shape) * int(name[1]) != len(body):
        raise ValueError(f"tenbin says {name} of shape {shape}, and has {len(body)} bytes")
    return np.frombuffer(body, "<" + name).reshape(shape).copy()


Decoder = Callable[[bytes], Any]
Decode = bool | str | Mapping[str, Decoder]
EXPANDED_LIMIT = 1 << 31  # greatest number of bytes that one member may expand to
INTEGERS = frozenset({"class", "cls", "cls2", "count", "id", "index", "inx"})
TEXTS = frozenset({"htm", "html", "text", "transcript", "txt"})


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode a .npy payload into a new array.

    Raises:
        ValueError: it is invalid, contains objects, or its size does not match its header.
    """
    shape, is_fortran, dtype, begin = npy_head_of(data)
    if dtype.hasobject:
        raise ValueError("an .npy of objects is a pickle; store numbers, or give allow_pickle=True and the extension pkl")
    rest = len(data) - begin
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"its header says {dtype} of shape {shape}, and {rest} bytes follow")
    array = np.frombuffer(data, dtype, offset=begin) if rest else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T.copy("K") if is_fortran else array.reshape(shape).copy()


def decode_npz(data: bytes) -> dict[str, NDArray[Any] | bytes]:
    """Decode the arrays of a .npz payload by name; members that are not .npy stay bytes, as in numpy.

    numpy's own reader would allocate whatever a header claims, and decompress without a limit.

    Raises:
        ValueError: it is damaged, would expand to more than 2 GiB, or contains something that `decode_npy` rejects.
    """
    found: dict[str, NDArray[Any] | bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            nbytes = sum(info.file_size for info in archive.infolist())
            if nbytes > EXPANDED_LIMIT:
                raise ValueError(
                    f"npz: expands to {nbytes} bytes, more than {EXPANDED_LIMIT}; store it as .npy, or give a decoder of your own"
                )
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"npz: {info.filename!r} is compressed by method {info.compress_type}; numpy writes 0 and 8")
                with archive.open(info) as member:
                    payload = member.read(info.file_size)  # the limit stops zipfile from inflating more
                is_array = payload.startswith(np.lib.format.MAGIC_PREFIX)
                found[info.filename.removesuffix(".npy")] = decode_npy(payload) if is_array else payload
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"npz: {error}") from error
    return found


def gunzip(data: bytes) -> bytes:
    """Decompress a gzip file.

    Raises:
        ValueError: it is truncated, damaged, or expands to more than 2 GiB.
    """
    return inflated(data, "gzip", EXPANDED_LIMIT) if data else b""


def unzstd(data: bytes) -> bytes:
    """Decompress a member that was compressed with zstd.

    Raises:
        ValueError: it is truncated, damaged, or expands to more than 2 GiB.
        ModuleNotFoundError: no zstd library is installed (extra `zstd`).
    """
    pieces, total = [], 0
    for piece in expanded_pieces("zst", io.BytesIO(data)):
        total += len(piece)
        if total > EXPANDED_LIMIT:
            raise ValueError(f"zstd: expands to more than {EXPANDED_LIMIT} bytes")
        pieces.append(piece)
    return b"".join(pieces)


EXPANDERS: dict[str, Decoder] = {"gz": gunzip, "zst": unzstd}  # decompress single members, by the last part of their names
ZSTD_LEVEL = 3  # zstd's default


def zstd(data: bytes, level: int = ZSTD_LEVEL) -> bytes:
    """Compress a member with zstd."""
    return b"".join(zstd_pieces(memoryview(data), level))


class Decoders:
    """The decoders of a dataset, found by the extensions of members.

    Args:
        decode: True uses the safe ones; False none; a str also decodes images, by webdataset's image specs ("pil", "rgb8"); a
            mapping of extensions to functions takes precedence over the safe ones.
        allow_pickle: also use decoders that can run arbitrary code.
    Raises:
        ValueError: the image spec is invalid.
    """

    def __init__(self, decode: Decode, *, allow_pickle: bool = False) -> None:
        self._decode, self._allow_pickle = decode, allow_pickle
        self._image = image_decoder(decode) if isinstance(decode, str) else None
        self._own = dict(decode) if isinstance(decode, Mapping) else {}
        self._found: dict[str, Decoder | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Decoders, allow_pickle=self._allow_pickle), (self._decode,)

    def of(self, extension: str) -> Decoder | None:
        """Return the decoder for an extension; None if its value is the unchanged bytes."""
        if extension not in self._found:
            self._found[extension] = self._search(extension)
        return self._found[extension]

    def is_plain(self, extension: str) -> bool:
        """Return whether the extension has its default decoder, so that native code may decode instead."""
        return self._decode is not False and extension not in self._own and extension.rpartition(".")[2] not in self._own

    def _search(self, extension: str) -> Decoder | None:
        last = extension.rpartition(".")[2]
        for name in (extension, last):
            if name in self._own:
                return self._own[name]
        if self._decode is False:
            return None
        if (expand := EXPANDERS.get(last)) is not None:
            inner = self._search(extension.rpartition(".")[0])
            return expand if inner is None else lambda data: inner(expand(data))
        if last in IMAGE_EXTENSIONS and self._image is not None:
            return self._image
        if last in _UNSAFE:
            return _UNSAFE[last] if self._allow_pickle else None
        if last in _MODULES:
            module, function = _MODULES[last]
            try:
                return partial(getattr(importlib.import_module(module), function))
            except ImportError:
                return None
        return _SAFE.get(last)


def _torch() -> Any:
    return importlib.import_module("torch")


_SAFE: dict[str, Decoder] = {
    **dict.fromkeys(TEXTS, partial(str, encoding="utf-8")),
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(("jsn", "json"), json.loads),
    **dict.fromkeys(("tb", "ten", "tenbin"), decode_tenbin),
    "npy": decode_npy,
    "npz": decode_npz,
}
_UNSAFE: dict[str, Decoder] = {
    **dict.fromkeys(("pickle", "pkl", "pyd"), pickle.loads),
    "pth": lambda data: _torch().load(io.BytesIO(data), weights_only=False),
}
_MODULES = {"cbor": ("cbor", "loads"), **dict.fromkeys(("mp", "msg", "msgpack"), ("msgpack", "unpackb"))}


Encoder = Callable[[Any], bytes]


def encode(extension: str, value: Any) -> bytes:
    """Return a value as the bytes of a member with this extension. Bytes and str are not converted; str becomes UTF-8.

    Raises:
        ValueError, TypeError: the extension has no encoder for this value.
    """
    inner, _, last = extension.lower().rpartition(".")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if last in EXPANDERS:
        return gzip.compress(encode(inner, value), mtime=0) if last == "gz" else zstd(encode(inner, value))
    if isinstance(value, str):
        return value.encode("utf-8")
    encoder = _ENCODERS.get(last)
    if encoder is None:
        raise ValueError(
            f"extension {extension!r} has no encoder for values of type {type(value).__name__}: give bytes, or one of the "
            f"extensions {', '.join(sorted(_ENCODERS))}"
        )
    return encoder(value)


def _written(write: Callable[[Any], object]) -> bytes:
    """Return the bytes that `write` writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _npz(value: Any) -> bytes:
    arrays: dict[str, Any] = {name: np.asarray(each) for name, each in value.items()}
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise ValueError(f"npz: {objects[0]!r} is an array of objects, which would be a pickle; give numbers or text")
    # no allow_pickle=, which numpy before 2.2 would store as an array; members are dated 1980, so the bytes are always the same
    return _written(lambda file: np.savez(file, **arrays))


def _integer(value: Any) -> bytes:
    try:
        return b"%d" % operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):  # a float would lose its fraction
        raise TypeError(f"an integer is needed, got {value!r}: use an extension that can store it, such as json or npy") from None


def _not_text(value: Any) -> bytes:
    raise TypeError(f"text is str or bytes; got {type(value).__name__}")


def _encode_picture(kind: str, value: Any) -> bytes:
    from PIL import Image

    picture = value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))
    if kind == "JPEG" and picture.mode not in ("L", "RGB", "CMYK"):
        picture = picture.convert("RGB")
    return _written(lambda file: picture.save(file, format=kind, **({"quality": 100} if kind == "JPEG" else {})))


_ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(INTEGERS, _integer),
    **dict.fromkeys(TEXTS, _not_text),
    **dict.fromkeys(("jsn", "json"), lambda value: json.dumps(value).encode("utf-8")),
    **dict.fromkeys(("tb", "ten", "tenbin"), encode_tenbin),
    **dict.fromkeys(("pickle", "pkl", "pyd"), pickle.dumps),
    **dict.fromkeys(("mp", "msg", "msgpack"), lambda value: importlib.import_module("msgpack").packb(value)),
    **dict.fromkeys(("image", "img", "jpeg", "jpg"), partial(_encode_picture, "JPEG")),
    **dict.fromkeys(("tif", "tiff"), partial(_encode_picture, "TIFF")),
    **dict.fromkeys(("pbm", "pgm", "ppm"), partial(_encode_picture, "PPM")),
    "png": partial(_encode_picture, "PNG"),
    "cbor": lambda value: importlib.import_module("cbor").dumps(value),
    "npy": lambda value: _written(lambda file: np.save(file, np.asarray(value), allow_pickle=False)),
    "npz": _npz,
    "pth": lambda value: _written(lambda file: _torch().save(value, file)),
}
