"""From a member's bytes to its value, by the last part of its extension; what is not known stays bytes.

What could run code (pickle, torch.load) is decoded only when asked for. No payload makes room for more than it says it needs and
holds: an .npy header is checked against the bytes behind it, what gzip and npz expand to has a limit.

Source: webdataset 1.0.2, autodecode.py. Its encoders of class, count, msgpack, tenbin and html have
no decoder there; they have one here.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.formats.tar.images import IMAGE_EXTENSIONS, image_decoder
from shmload.formats.tar.tenbin import decode_tenbin

Decoder = Callable[[bytes], Any]
Decode = bool | str | Mapping[str, Decoder]
EXPANDED_LIMIT = 1 << 31  # bytes that one member may expand to
INTEGERS = frozenset({"class", "cls", "cls2", "count", "id", "index", "inx"})
TEXTS = frozenset({"htm", "html", "text", "transcript", "txt"})


def decode_npy(data: bytes) -> NDArray[Any]:
    """A .npy payload as an array of its own.

    Raises:
        ValueError: it is none, holds objects, or has more or fewer bytes than its header says.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(
            "an .npy of objects is a pickle; store numbers, or give allow_pickle=True and the extension pkl"
        )
    rest = len(data) - file.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"its header says {dtype} of shape {shape}, and {rest} bytes follow")
    array = np.frombuffer(data, dtype, offset=file.tell()) if rest else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T.copy("K") if is_fortran else array.reshape(shape).copy()


def decode_npz(data: bytes) -> dict[str, NDArray[Any] | bytes]:
    """The arrays of a .npz payload by name; what in it is no .npy stays bytes, as numpy leaves it.

    numpy's own reader would make room for whatever a header says, and inflate without an end.

    Raises:
        ValueError: it is damaged, would expand to more than 2 GiB, or holds what `decode_npy` refuses.
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
                    raise ValueError(
                        f"npz: {info.filename!r} is compressed by method {info.compress_type}; numpy writes 0 and 8"
                    )
                with archive.open(info) as member:
                    payload = member.read(info.file_size)  # with that limit zipfile inflates no more, whatever is there
                is_array = payload.startswith(np.lib.format.MAGIC_PREFIX)
                found[info.filename.removesuffix(".npy")] = decode_npy(payload) if is_array else payload
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"npz: {error}") from error
    return found


def gunzip(data: bytes) -> bytes:
    """What a gzip file holds.

    Raises:
        ValueError: it is truncated, damaged, or expands to more than 2 GiB.
    """
    found = []
    room = EXPANDED_LIMIT
    while data:
        stream = zlib.decompressobj(31)
        try:
            found.append(stream.decompress(data, room))
        except zlib.error as error:
            raise ValueError(f"gzip: {error}") from error
        room -= len(found[-1])
        if not stream.eof:
            raise ValueError("gzip: truncated" if room > 0 else f"gzip: expands to more than {EXPANDED_LIMIT} bytes")
        data = stream.unused_data
    return b"".join(found)


class Decoders:
    """Which decoder an extension has.

    Args:
        decode: True, the safe ones; False, none; a str, also images, as webdataset's image specs name them ("pil", "rgb8"); a
            mapping of extensions to functions, which go before the safe ones.
    Raises:
        ValueError: there is no such image spec.
    """

    def __init__(self, decode: Decode, *, allow_pickle: bool = False) -> None:
        self._decode, self._allow_pickle = decode, allow_pickle
        self._image = image_decoder(decode) if isinstance(decode, str) else None
        self._own = dict(decode) if isinstance(decode, Mapping) else {}
        self._found: dict[str, Decoder | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Decoders, allow_pickle=self._allow_pickle), (self._decode,)

    def of(self, extension: str) -> Decoder | None:
        """The decoder of an extension; None if its value is the bytes."""
        if extension not in self._found:
            self._found[extension] = self._search(extension)
        return self._found[extension]

    def is_plain(self, extension: str) -> bool:
        """Whether the extension's decoder is the usual one, and so may be done natively."""
        return (
            self._decode is not False and extension not in self._own and extension.rpartition(".")[2] not in self._own
        )

    def _search(self, extension: str) -> Decoder | None:
        last = extension.rpartition(".")[2]
        for name in (extension, last):
            if name in self._own:
                return self._own[name]
        if self._decode is False:
            return None
        if last == "gz":
            inner = self._search(extension.rpartition(".")[0])
            return gunzip if inner is None else lambda data: inner(gunzip(data))
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


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _torch(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


_SAFE: dict[str, Decoder] = {
    **dict.fromkeys(TEXTS, _text),
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(("jsn", "json"), json.loads),
    **dict.fromkeys(("tb", "ten", "tenbin"), decode_tenbin),
    "npy": decode_npy,
    "npz": decode_npz,
}
_UNSAFE: dict[str, Decoder] = {**dict.fromkeys(("pickle", "pkl", "pyd"), pickle.loads), "pth": _torch}
_MODULES = {"cbor": ("cbor", "loads"), **dict.fromkeys(("mp", "msg", "msgpack"), ("msgpack", "unpackb"))}
