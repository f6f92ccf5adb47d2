"""Encode samples as members of a tar file, (extension, bytes), so that reading them back returns values of the same kind.

| value | extension | read back as |
|---|---|---|
| image (see below), encoded image | jpg, png, tif, ... , npy | an image |
| int, numpy integer, integer array or tensor without dimensions | cls | int |
| str | txt | str |
| bool, float, None | json | the same |
| list, tuple, dict of values that JSON supports | json | the same; a tuple as a list |
| array, tensor | npy | array |
| dict or list of arrays (a list: under "0", "1", ...) | npz | dict of arrays |
| bytes | bin, or by format if it is an encoded image | bytes |
| path (`pathlib`) | by the file's format | its bytes |

A sample that is a tuple consists of an image and optionally a label. A sample that is a dict keeps its names: `image` and `label`
have the same meaning as in a tuple, and other fields become `<name>.<extension>` ("caption.txt"), which webdataset decodes by the
last part. A name that already ends in a known extension ("seg.png") is used unchanged, and its value must have that format. A name
that is only a known extension ("id", "text") is used unchanged if the value has that format; otherwise it is treated like any other
name ("id.txt"). Bytes under the extension of a sound or video keep it ("wav", "song.mp3").

If the user has given a serializer for the type of a value, its result is used instead.

Nothing is pickled. A value that cannot be encoded is an error that names the field.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shmload.batch.collate import is_tensor
from shmload.formats.tar.encoders import encode, unmasked
from shmload.formats.tar.extensions import IMAGE_EXTENSIONS, INTEGERS, SOUNDS_AND_VIDEOS, TEXTS
from shmload.formats.tar.member_compression import EXPANDERS
from shmload.formats.tar.shard_index import KEY
from shmload.remote.packing.image_members import (
    FloatImages,
    NotPixelsError,
    array_member,
    array_of_tensor,
    named_image,
    picture_member,
)
from shmload.remote.packing.image_signatures import PEEK, image_extension, is_format

Members = list[tuple[str, bytes]]
Serializers = Mapping[type, tuple[str, Callable[[Any], bytes]]]  # type of a value -> (extension, value -> bytes)
T = TypeVar("T")
_KNOWN = INTEGERS | TEXTS | IMAGE_EXTENSIONS | {"json", "jsn", "npy", "npz", "ten", "tb", "tenbin", "bin"} | EXPANDERS.keys()
_PLAIN = re.compile(r"[^a-z0-9_.-]")
_PICTURES = {"jpg", "jpeg", "png", "tif", "tiff", "pbm", "pgm", "ppm", "webp", "gif", "bmp"}
_BYTES = (bytes, bytearray, memoryview)
_FACES = {"image": "", "label": ""}  # fields whose members are named by their extension only; their order in a tuple


def members_of(
    sample: Any, quality: int | None, serializers: Serializers | None = None, float_images: FloatImages = None
) -> Members:
    """Return the members of a sample, sorted by extension.

    Args:
        sample: an image, (image,), (image, label), or a dict.
        quality: JPEG quality for images that are encoded; None encodes without loss.
        serializers: the user's serializers by type.
        float_images: how the dataset stores its images of floats; None decides for this sample alone.
    Raises:
        NotPixelsError: `float_images` is "png", and the sample has an image of floats that are not all k / 255.
        TypeError, ValueError: the sample has another form, or a field cannot be encoded; the message names it.
    """
    own = serializers or {}
    if isinstance(sample, Mapping):
        found = _of_fields(sample, quality, own, float_images)
    elif isinstance(sample, tuple) and hasattr(sample, "_asdict"):
        found = _of_fields(sample._asdict(), quality, own, float_images)
    elif isinstance(sample, (tuple, list)):
        if not 1 <= len(sample) <= 2:
            raise TypeError(
                f"a sample is an image and a label, or a dict of named fields; this one is of type {type(sample).__name__} and "
                f"length {len(sample)}: return a dict"
            )
        found = [_field(name, value, quality, own, float_images) for name, value in zip(_FACES, sample, strict=False)]
    else:
        found = [_field("image", sample, quality, own, float_images)]
    found.sort(key=lambda member: member[0])
    for (one, _), (other, _) in pairwise(found):
        if one == other:
            raise ValueError(f"two fields of the sample would both be its member {one!r}: give one another name")
    return found


def _of_fields(sample: Mapping[Any, Any], quality: int | None, own: Serializers, float_images: FloatImages) -> Members:
    found: Members = []
    for name, value in sample.items():
        if not isinstance(name, str):
            raise TypeError(f"the fields of a sample have names that are str; this one has {name!r}")
        if name == KEY or name.startswith("__"):
            continue
        if name in _FACES:
            found.append(_field(name, value, quality, own, float_images))
            continue
        plain = _PLAIN.sub("_", name.lower())
        if plain.startswith("__"):
            raise ValueError(
                f"the field {name!r} would be the member {plain!r}, which readers leave out: only a-z, 0-9, `_`, `.` and `-` of a "
                "name are kept, and names that begin with `__` are no fields. Give it another name"
            )
        if _is_kept_as(plain, value) and serializer_of(value, own) is None:
            found.append((plain, _named(name, named_member, plain, value, quality)))
        else:
            extension, data = _field(name, value, quality, own, float_images)
            found.append((f"{plain.strip('.') or 'field'}.{extension}", data))
    if not found:
        raise ValueError("a sample needs at least one field; this dict has none")
    return found


def _is_kept_as(name: str, value: Any) -> bool:
    """Return whether a field's name is the extension of its member.

    A name without a dot may also be a plain name, such as "id" or "text"; then the value decides.
    """
    last = name.rpartition(".")[2]
    if last in SOUNDS_AND_VIDEOS:
        return isinstance(value, _BYTES)
    if last not in _KNOWN or last != name:
        return last in _KNOWN
    if isinstance(value, _BYTES):
        return _can_be(last, value)
    if last in _PICTURES:
        return isinstance(value, (str, os.PathLike, np.ndarray)) or is_tensor(value) or hasattr(value, "getbands")
    if last in INTEGERS:
        return _is_integer(value)
    if last == "npz":
        return isinstance(value, Mapping | list | tuple)
    return isinstance(value, str) if last in TEXTS else last not in IMAGE_EXTENSIONS and last != "bin"


def _can_be(extension: str, value: bytes | bytearray | memoryview) -> bool:
    """Return whether bytes may be the content of a member; False if an id is not a number, or text is not UTF-8."""
    try:
        if extension in INTEGERS:
            int(bytes(value))
        elif extension in TEXTS:
            str(value, "utf-8")
    except ValueError:
        return False
    return True


def _is_integer(value: Any) -> bool:
    try:
        encode("cls", value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def named_member(extension: str, value: Any, quality: int | None) -> bytes:
    """Encode a field whose name determines its extension.

    Raises:
        TypeError, ValueError: this format cannot store the value.
    """
    unmasked(value)
    last = extension.rpartition(".")[2]
    if isinstance(value, _BYTES):
        return bytes(value)
    if last in IMAGE_EXTENSIONS:
        return named_image(last, value, quality)
    if isinstance(value, str) and last in ("json", "jsn"):
        json.loads(value)  # the text is JSON already
    elif isinstance(value, str) and last not in TEXTS | EXPANDERS.keys():
        raise TypeError(f"{last!r} holds no text, and got {value[:40]!r}: end the name in .txt, or give bytes")
    return encode(extension, array_of_tensor(value) if is_tensor(value) else value)


def _field(name: str, value: Any, quality: int | None, own: Serializers, float_images: FloatImages) -> tuple[str, bytes]:
    """Return (extension, bytes) of a field."""
    if serializer_of(value, own) is not None:
        return _named(name, serialized, value, own)
    if name == "image":
        return _named(name, image_member, value, quality, float_images)
    return _named(name, value_member, value, quality)


def serializer_of(value: Any, own: Serializers) -> tuple[str, Callable[[Any], bytes]] | None:
    """Return the user's serializer for the type of a value, or for its nearest base class; None if there is none."""
    return next((own[kind] for kind in type(value).__mro__ if kind in own), None) if own else None


def serialized(value: Any, own: Serializers) -> tuple[str, bytes]:
    """Return (extension, bytes) of a value that has a serializer.

    Raises:
        TypeError: the serializer does not return bytes.
    """
    extension, serialize = serializer_of(value, own) or ("", bytes)
    if not isinstance(data := serialize(value), bytes):
        raise TypeError(f"the serializer of {_name_of(value)} gives bytes; it gave {_name_of(data)}")
    return extension, data


def _named(name: str, encoder: Callable[..., T], *arguments: Any) -> T:
    """Call an encoder for a field. Its errors name the field."""
    try:
        return encoder(*arguments)
    except NotPixelsError:  # it names the field, and its type decides how the dataset is packed
        raise
    except (ValueError, TypeError, OSError, RuntimeError) as error:  # a base class: subclasses may need more arguments
        kind = next(each for each in (OSError, TypeError, RuntimeError, ValueError) if isinstance(error, each))
        raise kind(f"field {name!r}: {error}") from error


def image_member(value: Any, quality: int | None, float_images: FloatImages = None) -> tuple[str, bytes]:
    """Return (extension, bytes) of the field `image`. A str is a path here."""
    if isinstance(value, str):
        value = Path(value)
    unmasked(value)
    if isinstance(value, np.ndarray):
        return array_member(value, quality, is_tensor=False, float_images=float_images)
    if is_tensor(value):
        return array_member(array_of_tensor(value), quality, is_tensor=True, float_images=float_images)
    return value_member(value, quality)


def value_member(value: Any, quality: int | None) -> tuple[str, bytes]:
    """Return (extension, bytes) of any value.

    Raises:
        TypeError, ValueError: the value cannot be encoded.
    """
    unmasked(value)
    if isinstance(value, _BYTES):
        data = bytes(value)
        return image_extension(data[:PEEK]) or "bin", data
    if isinstance(value, os.PathLike):
        return file_member(os.fspath(value))
    if isinstance(value, str):
        return "txt", value.encode("utf-8")
    if isinstance(value, (bool, np.bool_, float)) or value is None:
        return "json", encode("json", bool(value) if isinstance(value, np.bool_) else value)
    if is_tensor(value):
        value = array_of_tensor(value)
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"):
        return "cls", b"%d" % int(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if np.asarray(value).dtype.hasobject:
            raise TypeError("an array of objects would be a pickle: return numbers, or a list of str")
        return "npy", encode("npy", value)
    if isinstance(value, (list, tuple, Mapping)):
        return _structure(value)
    if hasattr(value, "getbands"):  # a Pillow image
        return picture_member(value, quality)
    raise TypeError(
        f"no format stores values of type {_name_of(value)}: return an image, array, number, str, bytes, or a list or dict of these"
    )


def file_member(path: str | bytes) -> tuple[str, bytes]:
    """Return (extension, bytes) of a file. Its first bytes determine the extension, and its name does if they are unknown."""
    data = Path(os.fsdecode(path)).read_bytes()
    return file_extension(path, data[:PEEK]), data


def file_extension(path: str | bytes, begin: bytes) -> str:
    """Return the extension under which a file is stored, given its path and its first `PEEK` bytes."""
    suffix = os.path.splitext(os.fsdecode(path))[1][1:].lower()
    found = image_extension(begin)
    return suffix if suffix and is_format(found, suffix) else found or _PLAIN.sub("_", suffix) or "bin"


def _structure(value: Any) -> tuple[str, bytes]:
    try:
        text = json.dumps(value, separators=(",", ":")) if _is_json(value) else None
    except RecursionError:
        raise ValueError(
            f"a value of type {_name_of(value)} contains itself, or is nested too deeply for JSON: return a flatter value"
        ) from None
    if text is not None:
        return "json", text.encode("utf-8")
    pairs = value.items() if isinstance(value, Mapping) else ((str(number), each) for number, each in enumerate(value))
    arrays = {}
    for name, each in pairs:
        array = array_of_tensor(each) if is_tensor(each) else each
        if isinstance(array, (int, float)):
            array = np.asarray(array)
        is_kept = isinstance(array, (np.ndarray, np.generic)) and not np.asarray(array).dtype.hasobject
        if not is_kept or not isinstance(name, str) or "/" in name:
            raise TypeError(
                f"no format stores values of type {_name_of(value)} with {_name_of(each)} under {name!r}: JSON cannot, and .npz "
                "stores only arrays"
            )
        arrays[name] = array
    return "npz", encode("npz", arrays)


def _is_json(value: Any) -> bool:
    """Return whether JSON preserves the value: keys are str, and numbers are Python's own."""
    if isinstance(value, Mapping):
        return all(type(name) is str and _is_json(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
