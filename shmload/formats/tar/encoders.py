"""From a value to a member's bytes, by the last part of its extension, as webdataset's writer does.

bytes and str pass as they are.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from shmload.formats.tar.decoders import INTEGERS, TEXTS
from shmload.formats.tar.tenbin import encode_tenbin

Encoder = Callable[[Any], bytes]


def encode(extension: str, value: Any) -> bytes:
    """The bytes of a value.

    Raises:
        ValueError, TypeError: the extension has no encoder for such a value.
    """
    inner, _, last = extension.lower().rpartition(".")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if last == "gz":
        return gzip.compress(encode(inner, value), mtime=0)
    if isinstance(value, str):
        return value.encode("utf-8")
    encoder = _ENCODERS.get(last)
    if encoder is None:
        raise ValueError(
            f"extension {extension!r} has no encoder for a {type(value).__name__}: give bytes, or one of the extensions "
            f"{', '.join(sorted(_ENCODERS))}"
        )
    return encoder(value)


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _npz(value: Any) -> bytes:
    arrays: dict[str, Any] = {name: np.asarray(each) for name, each in value.items()}
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise ValueError(f"npz: {objects[0]!r} is an array of objects, which would be a pickle; give numbers or text")
    file = io.BytesIO()
    np.savez(file, **arrays)  # without allow_pickle=, which numpy before 2.2 would store as an array
    return file.getvalue()  # its members are dated 1980: the bytes are the same every time


def _integer(value: Any) -> bytes:
    return str(int(value)).encode("ascii")


def _not_text(value: Any) -> bytes:
    raise TypeError(f"text is str or bytes; got {type(value).__name__}")


def _torch(value: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8")


def _picture(kind: str, **options: Any) -> Encoder:
    def write(value: Any) -> bytes:
        from PIL import Image

        picture = value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))
        if kind == "JPEG" and picture.mode not in ("L", "RGB", "CMYK"):
            picture = picture.convert("RGB")
        file = io.BytesIO()
        picture.save(file, format=kind, **options)
        return file.getvalue()

    return write


def _by(module: str, function: str) -> Encoder:
    def write(value: Any) -> bytes:
        found: bytes = getattr(importlib.import_module(module), function)(value)
        return found

    return write


_ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(INTEGERS, _integer),
    **dict.fromkeys(TEXTS, _not_text),
    **dict.fromkeys(("jsn", "json"), _json),
    **dict.fromkeys(("tb", "ten", "tenbin"), encode_tenbin),
    **dict.fromkeys(("pickle", "pkl", "pyd"), pickle.dumps),
    **dict.fromkeys(("mp", "msg", "msgpack"), _by("msgpack", "packb")),
    **dict.fromkeys(("image", "img", "jpeg", "jpg"), _picture("JPEG", quality=100)),
    **dict.fromkeys(("tif", "tiff"), _picture("TIFF")),
    **dict.fromkeys(("pbm", "pgm", "ppm"), _picture("PPM")),
    "png": _picture("PNG"),
    "cbor": _by("cbor", "dumps"),
    "npy": _npy,
    "npz": _npz,
    "pth": _torch,
}
