"""Encode samples as members of a tar file, (extension, bytes), so that reading them back returns values of the same kind.

| value | extension | read back as |
|---|---|---|
| image (see below), encoded image | jpg, png, tif, ... , npy | an image |
| int, numpy integer, tensor with one integer | cls | int |
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
name ("id.txt").

If the user has given a serializer for the type of a value, its result is used instead.

Nothing is pickled. A value that cannot be encoded is an error that names the field.

The format of a file is determined by its first bytes, because names are unreliable and readers choose the decoder by the extension.

An image that is certainly unchanged keeps the bytes of its file; otherwise it is encoded without loss:

| image | becomes |
|---|---|
| Pillow image, unchanged since it was opened from a file | the file's bytes |
| Pillow image, mode 1, L, LA, P, RGB, RGBA, I;16 | PNG |
| Pillow image, mode CMYK, F, I, LAB, YCbCr | TIFF, which supports these modes |
| array or tensor, uint8, one, three or four channels | PNG |
| array or tensor, uint16, one channel | PNG of 16 bits |
| array or tensor, floats that are all k / 255 | PNG: the picture that ToTensor converted |
| any other array or tensor | .npy |

An array with three dimensions is (height, width, channels) if its last extent is 1, 3 or 4, otherwise channels first. A tensor is
channels first if its first extent is 1, 3 or 4, otherwise channels last. Where both are possible, this is the convention of the
library.

If a quality is given, images in mode L or RGB that would become 8-bit PNG become JPEG instead. This loses information, so it is
never the default.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload.formats.tar.encoders import encode
from shmload.formats.tar.extensions import IMAGE_EXTENSIONS, INTEGERS, TEXTS
from shmload.formats.tar.member_compression import EXPANDERS
from shmload.formats.tar.shard_index import KEY

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# two letters are too short to identify a format, so more of the header is matched
_BEGINNINGS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\xff\xd8\xff"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"BM.{4}\0{4}.{2}\0\0", re.DOTALL), "bmp"),  # reserved bytes, and the offset of the pixels
    (re.compile(rb"II\*\0|MM\0\*"), "tif"),
    (re.compile(rb"\0\0\0\x0cjP  \r\n"), "jp2"),
    (re.compile(rb"P5\s+(#|\d+\s)"), "pgm"),  # a comment, or the width
    (re.compile(rb"P6\s+(#|\d+\s)"), "ppm"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "webp"),
)
PEEK = 16  # number of bytes that suffices to recognize a format


def image_extension(begin: bytes) -> str:
    """Return the extension of an encoded image, from its first bytes; "" if the format is unknown."""
    return next((extension for pattern, extension in _BEGINNINGS if pattern.match(begin)), "")


PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
TIFF_MODES = frozenset({"CMYK", "F", "I", "LAB", "YCbCr"})
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
_COMPRESSION = 6  # zlib's default, given explicitly, so that another default of a library changes no byte


def picture_member(picture: Picture, quality: int | None) -> tuple[str, bytes]:
    """Return (extension, bytes) of a Pillow image; `quality` is as for `members_of`.

    Raises:
        ValueError: no format supports its mode.
    """
    if (data := file_of_picture(picture)) is not None:
        return image_extension(data[:PEEK]), data
    if picture.mode in TIFF_MODES:
        return "tif", _saved(picture, "TIFF")
    if picture.mode not in PNG_MODES:
        kept = ", ".join(sorted(PNG_MODES | TIFF_MODES))
        raise ValueError(
            f"an image of mode {picture.mode} cannot be stored, only one of {kept}: return image.convert('RGB'), for example"
        )
    return _picture_encoded(picture, quality)


def array_member(array: NDArray[Any], quality: int | None, *, is_tensor: bool) -> tuple[str, bytes]:
    """Return (extension, bytes) of an image given as an array. Whether it was a tensor decides the order of axes."""
    straight = _height_width_channels(array, is_tensor=is_tensor)
    pixels = None if straight is None else _pixels(straight)
    if pixels is None:
        return "npy", encode("npy", array)
    from PIL import Image

    return _picture_encoded(Image.fromarray(pixels), quality)


def _picture_encoded(picture: Picture, quality: int | None) -> tuple[str, bytes]:
    if quality is not None and picture.mode in ("L", "RGB"):
        return "jpg", _saved(picture, "JPEG", quality=quality)
    return "png", _saved(picture, "PNG", compress_level=_COMPRESSION)


def _height_width_channels(array: NDArray[Any], *, is_tensor: bool) -> NDArray[Any] | None:
    """Return the image with channels last, or without that dimension if it has one channel; None if it is not an image."""
    if 0 in array.shape or array.ndim not in (2, 3):
        return None
    if array.ndim == 2:
        return array
    first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
    if first and (is_tensor or not last):
        array = array.transpose(1, 2, 0)
    elif not last:
        return None
    return array[:, :, 0] if array.shape[2] == 1 else array


def _pixels(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the image as PNG can store it without loss: uint8, or uint16 with one channel; None if that is not possible."""
    if array.dtype == np.uint8 or (array.dtype == np.uint16 and array.ndim == 2):
        return np.ascontiguousarray(array)
    if array.dtype not in (np.float32, np.float64):
        return None
    if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
        return None
    levels = np.rint(array * 255).astype(np.uint8)
    again = levels.astype(array.dtype) / array.dtype.type(255)
    return np.ascontiguousarray(levels) if np.array_equal(again, array) else None


def _saved(picture: Picture, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format=format, **options)
    return file.getvalue()


def file_of_picture(picture: Picture) -> bytes | None:
    """Return the bytes of the file that an image was opened from, if the image is certainly unchanged.

    Operations return an image without a format. But in-place operations (paste, putpixel, thumbnail, seek) keep the information
    about the file. The file is therefore opened again and compared: by size and mode if the image has not been loaded yet,
    otherwise by its pixels.
    """
    from PIL import Image, ImageFile

    if not isinstance(picture, ImageFile.ImageFile) or not picture.format or picture.tell():
        return None
    try:
        data = _read_of(picture)
        if data is None or not image_extension(data[:PEEK]):
            return None
        with Image.open(io.BytesIO(data)) as again:
            if (again.format, again.size, again.mode) != (picture.format, picture.size, picture.mode):
                return None
            if getattr(picture, "_im", None) is None and picture.tile:
                return data if again.tile == picture.tile else None
            is_same = again.tobytes() == picture.tobytes() and again.getpalette() == picture.getpalette()
            return data if is_same else None
    except (OSError, ValueError, SyntaxError):  # encode the image if the file cannot be read again
        return None


def _read_of(picture: Any) -> bytes | None:
    filename = getattr(picture, "filename", "")
    if isinstance(filename, (str, bytes)) and filename:
        return Path(os.fsdecode(filename)).read_bytes()
    fp = getattr(picture, "fp", None)  # of bytes in memory; closed once the pixels are loaded
    return fp.getvalue() if isinstance(fp, io.BytesIO) else None


Members = list[tuple[str, bytes]]
Serializers = Mapping[type, tuple[str, Callable[[Any], bytes]]]  # type of a value -> (extension, value -> bytes)
T = TypeVar("T")
_KNOWN = INTEGERS | TEXTS | IMAGE_EXTENSIONS | {"json", "jsn", "npy", "npz", "ten", "tb", "tenbin", "bin"} | EXPANDERS.keys()
_PLAIN = re.compile(r"[^a-z0-9_.-]")
_PICTURES = {"jpg", "jpeg", "png", "tif", "tiff", "pbm", "pgm", "ppm", "webp", "gif", "bmp"}
_BYTES = (bytes, bytearray, memoryview)
_FACES = {"image": "", "label": ""}  # fields whose members are named by their extension only; their order in a tuple


def members_of(sample: Any, quality: int | None, serializers: Serializers | None = None) -> Members:
    """Return the members of a sample, sorted by extension.

    Args:
        sample: an image, (image,), (image, label), or a dict.
        quality: JPEG quality for images that are encoded; None encodes without loss.
        serializers: the user's serializers by type.
    Raises:
        TypeError, ValueError: the sample has another form, or a field cannot be encoded; the message names it.
    """
    own = serializers or {}
    if isinstance(sample, Mapping):
        found = _of_fields(sample, quality, own)
    elif isinstance(sample, tuple) and hasattr(sample, "_asdict"):
        found = _of_fields(sample._asdict(), quality, own)
    elif isinstance(sample, (tuple, list)):
        if not 1 <= len(sample) <= 2:
            raise TypeError(
                f"a sample is an image and a label, or a dict of named fields; this one is of type {type(sample).__name__} and "
                f"length {len(sample)}: return a dict"
            )
        found = [_field(name, value, quality, own) for name, value in zip(_FACES, sample, strict=False)]
    else:
        found = [_field("image", sample, quality, own)]
    found.sort(key=lambda member: member[0])
    for (one, _), (other, _) in pairwise(found):
        if one == other:
            raise ValueError(f"two fields of the sample would both be its member {one!r}: give one another name")
    return found


def _of_fields(sample: Mapping[Any, Any], quality: int | None, own: Serializers) -> Members:
    found: Members = []
    for name, value in sample.items():
        if not isinstance(name, str):
            raise TypeError(f"the fields of a sample have names that are str; this one has {name!r}")
        if name == KEY or name.startswith("__"):
            continue
        if name in _FACES:
            found.append(_field(name, value, quality, own))
            continue
        plain = _PLAIN.sub("_", name.lower())
        if _is_kept_as(plain, value) and serializer_of(value, own) is None:
            found.append((plain, _named(name, named_member, plain, value, quality)))
        else:
            extension, data = _field(name, value, quality, own)
            found.append((f"{plain.strip('.') or 'field'}.{extension}", data))
    if not found:
        raise ValueError("a sample needs at least one field; this dict has none")
    return found


def _is_kept_as(name: str, value: Any) -> bool:
    """Return whether a field's name is the extension of its member.

    A name without a dot may also be a plain name, such as "id" or "text"; then the value decides.
    """
    last = name.rpartition(".")[2]
    if last not in _KNOWN or last != name or isinstance(value, _BYTES):
        return last in _KNOWN
    if last in _PICTURES:
        return isinstance(value, (str, os.PathLike, np.ndarray)) or _is_tensor(value) or hasattr(value, "getbands")
    if last in INTEGERS:
        return _is_integer(value)
    return isinstance(value, str) if last in TEXTS else last not in IMAGE_EXTENSIONS and last != "bin"


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
    last = extension.rpartition(".")[2]
    if isinstance(value, _BYTES):
        return bytes(value)
    if last in IMAGE_EXTENSIONS:
        return _named_picture(last, value, quality)
    if isinstance(value, str) and last in ("json", "jsn"):
        json.loads(value)  # the text is JSON already
    elif isinstance(value, str) and last not in TEXTS | EXPANDERS.keys():
        raise TypeError(f"{last!r} holds no text, and got {value[:40]!r}: end the name in .txt, or give bytes")
    return encode(extension, _array(value) if _is_tensor(value) else value)


def _named_picture(extension: str, value: Any, quality: int | None) -> bytes:
    """Encode an image in the format of its name; a file that has this format is used unchanged."""
    if isinstance(value, (str, os.PathLike)):
        data = Path(value).read_bytes()
        if (found := image_extension(data[:PEEK])) and not _is_format(found, extension):
            raise ValueError(f"{os.fspath(value)} is a file of {found}: end the name in that, or in nothing")
        return data
    if isinstance(value, np.ndarray) or _is_tensor(value):
        is_tensor = not isinstance(value, np.ndarray)
        array = _array(value) if is_tensor else value
        straight = _height_width_channels(array, is_tensor=is_tensor)
        if straight is None:
            raise ValueError(f"an array of shape {array.shape} is not an image: it has 2 extents, or 3 of which one is 1, 3 or 4")
        from PIL import Image

        pixels = _pixels(straight)
        value = Image.fromarray(straight if pixels is None else pixels)
    file = file_of_picture(value) if hasattr(value, "getbands") else None
    if file is not None and _is_format(image_extension(file[:PEEK]), extension):
        return file  # no second generation
    if quality is not None and extension in ("jpg", "jpeg") and getattr(value, "mode", "") in ("L", "RGB"):
        return _saved(value, "JPEG", quality=quality)
    return encode(extension, value)


def _is_format(found: str, extension: str) -> bool:
    return found == extension or {found, extension} <= {"jpg", "jpeg"} or {found, extension} <= {"tif", "tiff"}


def _field(name: str, value: Any, quality: int | None, own: Serializers) -> tuple[str, bytes]:
    """Return (extension, bytes) of a field."""
    if serializer_of(value, own) is not None:
        return _named(name, serialized, value, own)
    return _named(name, image_member if name == "image" else value_member, value, quality)


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
    except (ValueError, TypeError, OSError, RuntimeError) as error:  # a base class: subclasses may need more arguments
        kind = next(each for each in (OSError, TypeError, RuntimeError, ValueError) if isinstance(error, each))
        raise kind(f"field {name!r}: {error}") from error


def image_member(value: Any, quality: int | None) -> tuple[str, bytes]:
    """Return (extension, bytes) of the field `image`. A str is a path here."""
    if isinstance(value, str):
        value = Path(value)
    if isinstance(value, np.ndarray):
        return array_member(value, quality, is_tensor=False)
    if _is_tensor(value):
        return array_member(_array(value), quality, is_tensor=True)
    return value_member(value, quality)


def value_member(value: Any, quality: int | None) -> tuple[str, bytes]:
    """Return (extension, bytes) of any value.

    Raises:
        TypeError, ValueError: the value cannot be encoded.
    """
    if isinstance(value, _BYTES):
        data = bytes(value)
        return image_extension(data[:PEEK]) or "bin", data
    if isinstance(value, os.PathLike):
        return file_member(os.fspath(value))
    if isinstance(value, str):
        return "txt", value.encode("utf-8")
    if isinstance(value, (bool, np.bool_, float)) or value is None:
        return "json", encode("json", bool(value) if isinstance(value, np.bool_) else value)
    if _is_tensor(value):
        value = _array(value)
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
    return suffix if suffix and _is_format(found, suffix) else found or _PLAIN.sub("_", suffix) or "bin"


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
        array = _array(each) if _is_tensor(each) else each
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


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "untyped_storage")


def _array(tensor: Any) -> Any:
    try:
        return tensor.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"a tensor of {tensor.dtype} has no numpy type: return tensor.float(), for example") from error


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
