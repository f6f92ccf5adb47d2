"""Encode the members of tar files by the last part of their extension, as webdataset does."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import operator
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shmload.batch.array_rows import is_masked
from shmload.formats.tar.extensions import INTEGERS, TEXTS
from shmload.formats.tar.member_compression import EXPANDERS, zstd
from shmload.formats.tar.tenbin import encode_tenbin

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


def unmasked(value: Any) -> Any:
    """Return the value.

    Raises:
        TypeError: it is a masked array, whose mask only a pickle stores.
    """
    if is_masked(value):
        raise TypeError("a masked array would lose its mask: give array.filled(value), and the mask as a field of its own")
    return value


def _written(write: Callable[[Any], object]) -> bytes:
    """Return the bytes that `write` writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _npz(value: Any) -> bytes:
    if isinstance(value, list | tuple):
        value = {str(number): each for number, each in enumerate(value)}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"npz: a dict or list of arrays is needed, got a value of type {type(value).__name__}: use npy for one array"
        )
    arrays: dict[str, Any] = {name: np.asarray(unmasked(each)) for name, each in value.items()}
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise ValueError(f"npz: {objects[0]!r} is an array of objects, which would be a pickle; give numbers or text")
    if refused := arrays.keys() & {"file", "allow_pickle"}:
        raise ValueError(f"npz: numpy's savez takes {min(refused)!r} for an argument of its own: give the array another name")
    # no allow_pickle=, which numpy before 2.2 would store as an array; members are dated 1980, so the bytes are always the same
    return _written(lambda file: np.savez(file, **arrays))


def _integer(value: Any) -> bytes:
    unmasked(value)
    try:
        return b"%d" % operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):  # a float would lose its fraction; a tensor has several elements
        raise TypeError(f"an integer is needed, got {value!r}: use an extension that can store it, such as json or npy") from None


def _not_text(value: Any) -> bytes:
    raise TypeError(f"text is str or bytes; got {type(value).__name__}")


def _pixels(kind: str, array: Any) -> Any:
    """Return an array as the format stores it.

    Raises:
        ValueError: it is of floats outside of [0, 1], or of integers that the format cannot store.
    """
    may_be_signed = kind in ("TIFF", "JPEG") and array.dtype == np.int32  # JPEG has an error of its own
    if array.dtype.kind in "iu" and array.dtype not in (np.uint8, np.uint16) and not may_be_signed:
        raise ValueError(f"{kind} stores integers of 8 or 16 bits without a sign, got an array of {array.dtype}: use npy")
    return _bytes_of_floats(array)


def _bytes_of_floats(array: Any) -> Any:
    """Return floats in [0, 1] as uint8, as webdataset does; other arrays unchanged."""
    if array.dtype.kind != "f":
        return array
    if array.size and not (array.min() > -0.001 and array.max() < 1.001):
        raise ValueError(f"a picture of floats needs values in [0, 1], got [{array.min()}, {array.max()}]: scale it, or use npy")
    return (array.clip(0, 1) * 255).astype(np.uint8)


def _encode_picture(kind: str, value: Any) -> bytes:
    from PIL import Image

    picture = value if isinstance(value, Image.Image) else Image.fromarray(_pixels(kind, np.asarray(unmasked(value))))
    values: Any = picture.getextrema() if picture.mode == "I" else (0, 0)
    is_beyond = values[0] < 0 or values[1] > 65535
    if kind == "PPM" and (is_beyond or picture.mode not in ("1", "L", "RGB", "I", "I;16")):
        what = "numbers outside of 0 to 65535" if is_beyond else f"mode {picture.mode}"
        raise ValueError(f"PPM and PGM store gray and RGB pictures of at most 16 bits, got a picture of {what}: use png or npy")
    if kind == "JPEG" and (picture.mode in ("I", "F") or picture.mode.startswith("I;16")):
        raise ValueError(f"a JPEG has 8 bits for each value, got a picture of mode {picture.mode}: convert it to uint8, or use png")
    if kind == "JPEG" and picture.mode not in ("L", "RGB", "CMYK"):
        picture = picture.convert("RGB")
    return _written(lambda file: picture.save(file, format=kind, **({"quality": 100} if kind == "JPEG" else {})))


_ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(INTEGERS, _integer),
    **dict.fromkeys(TEXTS, _not_text),
    **dict.fromkeys(("jsn", "json"), lambda value: json.dumps(value).encode("utf-8")),
    **dict.fromkeys(("tb", "ten", "tenbin"), lambda value: encode_tenbin([unmasked(each) for each in unmasked(value)])),
    **dict.fromkeys(("pickle", "pkl", "pyd"), pickle.dumps),
    **dict.fromkeys(("mp", "msg", "msgpack"), lambda value: importlib.import_module("msgpack").packb(value)),
    **dict.fromkeys(("image", "img", "jpeg", "jpg"), partial(_encode_picture, "JPEG")),
    **dict.fromkeys(("tif", "tiff"), partial(_encode_picture, "TIFF")),
    **dict.fromkeys(("pbm", "pgm", "ppm"), partial(_encode_picture, "PPM")),
    "png": partial(_encode_picture, "PNG"),
    "cbor": lambda value: importlib.import_module("cbor").dumps(value),
    "npy": lambda value: _written(lambda file: np.save(file, np.asarray(unmasked(value)), allow_pickle=False)),
    "npz": _npz,
    "pth": lambda value: _written(lambda file: importlib.import_module("torch").save(value, file)),
}
