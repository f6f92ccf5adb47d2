"""From the bytes of a file to RGB pixels: which library decodes, and what it is not given.

JPEG goes to Pillow's libjpeg-turbo, called directly so that a part of an image can be decoded, else to simplejpeg. Both decode into
memory of ours and report damage within a scan; Pillow and OpenCV make something up for what is damaged and say nothing. simplejpeg
reads every file to its end; the others are kept from files that are cut off. PNG and all others go to Pillow. What a file is, its
bytes say, not its name. Conversions to RGB are Pillow's, except that of 16 bits, which there is a clipping: the high byte is taken.

What every library's images have in common: a size, pixels or a part of them, and the memory these are decoded into.

What the head of a file says of the image in it, read before any library makes room for the pixels.

Source: ITU-T T.81 (JPEG), annex B; W3C Portable Network Graphics (third edition), 5.

The libjpeg-turbo that Pillow brings, called directly: it decodes what a crop needs of a JPEG, and leaves the rest out.

simplejpeg and OpenCV have a libjpeg-turbo each, but hide it. Pillow's wheels carry one as a shared library, and distributions link
Pillow with the system's. `_core.jpeg` binds whichever it is at run time; where there is none, or an old one, or one of another
interface, JPEGs are decoded whole, by simplejpeg or Pillow: the same pixels.
"""

from __future__ import annotations

import io
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload._core.jpeg import bind, decode

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels = NDArray[np.uint8]  # (height, width, 3)
Box = tuple[int, int, int, int]  # (top, left, bottom, right)
HINT = "pip install 'shmload[images]'"
_KEPT_NBYTES = 1 << 26  # of decoded pixels that a thread keeps its memory for
_local = threading.local()


class Part(NamedTuple):
    """Some pixels of an image, and the (top, left) they begin at."""

    pixels: Pixels
    origin: tuple[int, int]


class Opened(Protocol):
    """An image whose size is known and whose pixels are not decoded yet.

    Attributes:
        reductions: by how much its decoder itself can shrink it: powers of 2, 1 among them.
    """

    height: int
    width: int
    reductions: tuple[int, ...]

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        """The image, shrunk to a `reduction`-th, rounded up.

        Returns:
            `into`, or memory that the thread's next image overwrites.
        """

    def part(self, reduction: int, needed: Box) -> Part:
        """At least the needed pixels of the shrunk image, in memory that the thread's next image overwrites."""


def scratch(height: int, width: int) -> Pixels:
    """`memory` in the shape of an image."""
    return memory(height * width * 3).reshape(height, width, 3)


def memory(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread's for one image: fresh pages would cost a tenth of the decoding."""
    if nbytes > _KEPT_NBYTES:
        return np.empty(nbytes, np.uint8)
    kept: NDArray[np.uint8] | None = getattr(_local, "kept", None)
    if kept is None or kept.size < nbytes:
        kept = _local.kept = np.empty(nbytes, np.uint8)
    return kept[:nbytes]


JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END, _SCAN = 0xD9, 0xDA


class JpegHeader(NamedTuple):
    """A JPEG file's frame, and at which byte its first scan begins."""

    height: int
    width: int
    num_components: int
    scan_at: int


def jpeg_header(data: bytes) -> JpegHeader:
    """Reads the markers of a JPEG file up to its first scan.

    Raises:
        ValueError: they are damaged or cut off, or no image of 8 bits a channel follows; with the byte where that shows.
    """
    at, frame = 2, None
    while True:
        if at + 4 > len(data):
            raise ValueError(f"a JPEG that ends at byte {len(data)}, before its image begins")
        if data[at] != 0xFF:
            raise ValueError(f"a damaged JPEG: byte {at} is {data[at]:#04x}, where a marker has to begin")
        marker = data[at + 1]
        if marker == 0xFF:  # markers may be padded
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker == _END or length < 2 or at + 2 + length > len(data):
            raise ValueError(
                f"a damaged JPEG: the segment at byte {at} does not end within the {len(data)} bytes of the file"
            )
        if marker in _FRAMES:
            if length < 8:
                raise ValueError(f"a damaged JPEG: the frame at byte {at} has {length} bytes, needs 8")
            precision, height, width, num_components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8:
                raise ValueError(f"a JPEG of {precision} bits a channel; those of 8 can be decoded")
            if not height or not width:
                raise ValueError(f"a JPEG of {height} x {width} pixels, as the frame at byte {at} says")
            frame = (height, width, num_components)
        if marker == _SCAN:
            if frame is None:
                raise ValueError(f"a damaged JPEG: its scan at byte {at} has no frame before it")
            return JpegHeader(*frame, at)
        at += 2 + length


def jpeg_is_whole(data: bytes, header: JpegHeader) -> bool:
    """Whether the end marker is there. Within a scan its two bytes cannot occur."""
    return data.rfind(b"\xff\xd9") > header.scan_at


def png_header(data: bytes) -> tuple[int, int]:
    """Height and width of a PNG file, every chunk of which has the checksum it says.

    Raises:
        ValueError: one has not, or the file ends before its last; with the byte where that shows.
    """
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise ValueError("a damaged PNG: byte 8 begins no header")
    view = memoryview(data)
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        if at + 12 + length > len(data):
            break
        if zlib.crc32(view[at + 4 : at + 8 + length]) != int.from_bytes(data[at + 8 + length : at + 12 + length]):
            raise ValueError(f"a damaged PNG: the chunk at byte {at} has another checksum than it says")
        if data[at + 4 : at + 8] == b"IEND":
            width, height = struct.unpack_from(">II", data, 16)
            return height, width
        at += 12 + length
    raise ValueError(f"a PNG cut off: the chunk at byte {at} does not end within the {len(data)} bytes of the file")


LEAST_VERSION = (2, 1)  # of libjpeg-turbo: the oldest that the tests were run with


@cache
def unbound() -> str:
    """Why Pillow's libjpeg cannot be used; "" once it is bound. What is found out holds for the process."""
    try:
        from PIL import _imaging as native
    except ImportError as error:
        return f"Pillow is needed: {error}"
    version = str(getattr(native, "libjpeg_turbo_version", "none"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        return f"Pillow with libjpeg-turbo {'.'.join(map(str, LEAST_VERSION))} or later is needed; it has {version}"
    try:
        bind(os.fsencode(native.__file__ or ""))
    except ImportError as error:
        return str(error)
    return ""


class LibJpeg:
    """A JPEG that Pillow's libjpeg-turbo decodes, as far as it is needed."""

    reductions: tuple[int, ...] = (8, 4, 2, 1)

    def __init__(self, data: bytes, height: int, width: int, *, is_strict: bool, is_fast: bool) -> None:
        self._data, self.height, self.width = data, height, width
        self._is_strict, self._is_fast = is_strict, is_fast

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        height, width = -(-self.height // reduction), -(-self.width // reduction)
        if into is None:
            into = scratch(height, width)
        self._decode(into.reshape(-1), reduction, (0, 0, height, width))
        return into

    def part(self, reduction: int, needed: Box) -> Part:
        top, _, bottom, _ = needed
        into = memory((bottom - top) * -(-self.width // reduction) * 3)
        left, right = self._decode(into, reduction, needed)
        pixels = into[: (bottom - top) * (right - left) * 3].reshape(bottom - top, right - left, 3)
        return Part(pixels, (top, left))

    def _decode(self, into: NDArray[np.uint8], reduction: int, needed: Box) -> tuple[int, int]:
        if why := unbound():
            raise ImportError(f"decoder='libjpeg': {why}; {HINT}")
        return decode(
            self._data,
            into,
            (-(-self.height // reduction), -(-self.width // reduction)),
            needed,
            reduction=reduction,
            is_strict=self._is_strict,
            is_fast=self._is_fast,
        )


T = TypeVar("T")
LIBRARIES = ("auto", "libjpeg", "simplejpeg", "pillow", "opencv")


def open_image(data: bytes, library: str, max_pixels: int, *, is_strict: bool, is_fast: bool) -> Opened:
    """Looks at a file's head.

    Raises:
        ValueError: it is empty, damaged, no image, or larger than `max_pixels`.
        ImportError: there is no library for it.
    """
    if not data:
        raise ValueError("an empty file")
    if data.startswith(JPEG):
        header = jpeg_header(data)
        _check_size(header.height, header.width, max_pixels)
        chosen = _jpeg_library(library) if header.num_components in (1, 3) else "pillow"
        if chosen == "simplejpeg":
            return _Jpeg(data, header.height, header.width, is_strict=is_strict, is_fast=is_fast)
        if is_strict and not jpeg_is_whole(data, header):
            raise ValueError(f"a JPEG cut off: {len(data)} bytes without an end marker")
        if chosen == "libjpeg":
            return LibJpeg(data, header.height, header.width, is_strict=is_strict, is_fast=is_fast)
        if chosen == "opencv":
            return _OpenCv(data, header.height, header.width)
    elif data.startswith(PNG):
        height, width = png_header(data)
        _check_size(height, width, max_pixels)
        if library == "opencv":
            return _OpenCv(data, height, width)
    return _Pillow(open_picture(data), max_pixels)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(
            f"{height} x {width} pixels are more than max_pixels={max_pixels}; give a larger one if the file is meant to be so"
        )


def _jpeg_library(library: str) -> str:
    if library != "auto":
        return library
    if not unbound():
        return "libjpeg"
    try:
        import simplejpeg  # noqa: F401  # only whether it is there
    except ImportError:
        return "pillow"
    return "simplejpeg"


def open_picture(data: bytes) -> Picture:
    """Pillow's image of a file, not decoded yet.

    Raises:
        ValueError: Pillow knows no such format.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"decoding this image needs Pillow: {HINT}") from error
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError(f"no image that Pillow knows: {len(data)} bytes, the first are {data[:8]!r}") from None


def rgb_picture(picture: Picture) -> Picture:
    """The image in Pillow's mode RGB.

    Raises:
        ValueError: its values have no range that could be told.
    """
    mode = picture.mode
    if mode.startswith("I;16"):
        from PIL import Image

        high = (np.asarray(picture) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if mode in ("I", "F"):
        raise ValueError(f"an image of mode {mode!r}, 32 bits without a range; convert it to 8 bits beforehand")
    if mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def orientation(data: bytes) -> int:
    """The EXIF orientation, 1 to 8; 1 if there is none."""
    if b"Exif" not in data[:65536] and b"eXIf" not in data:
        return 1
    found = open_picture(data).getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


def checked(read: Callable[[], T]) -> T:
    """What `read` gives; whatever a library raises about a file is a ValueError."""
    try:
        return read()
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Pillow has OSError, SyntaxError, struct.error, its own; OpenCV cv2.error
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _all_of(image: Opened, reduction: int, needed: Box) -> Part:
    """The part of those whose library decodes an image whole or not at all."""
    return Part(image.pixels(reduction), (0, 0))


class _Jpeg:
    """A JPEG that simplejpeg decodes."""

    part = _all_of
    reductions: tuple[int, ...] = (8, 4, 2, 1)

    def __init__(self, data: bytes, height: int, width: int, *, is_strict: bool, is_fast: bool) -> None:
        self._data, self.height, self.width = data, height, width
        self._is_strict, self._is_fast = is_strict, is_fast

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import simplejpeg
        except ImportError as error:
            raise ImportError(f"decoder='simplejpeg' needs simplejpeg: {HINT}") from error
        height, width = -(-self.height // reduction), -(-self.width // reduction)
        if into is None:
            into = scratch(height, width)
        if not self._is_strict:
            into.fill(0)  # where it gives up it says nothing, and leaves what was in the memory: an image before
        found: Pixels = simplejpeg.decode_jpeg(
            self._data,
            "RGB",
            fastdct=self._is_fast,
            fastupsample=self._is_fast,
            min_height=height if reduction > 1 else 0,
            min_width=width if reduction > 1 else 0,
            buffer=into,
            strict=self._is_strict,
        )
        if found.shape != into.shape:
            raise ValueError(f"a JPEG decoded to {found.shape[:2]}, where its header makes it {into.shape[:2]}")
        return into


class _Pillow:
    """An image that Pillow decodes."""

    part = _all_of

    def __init__(self, picture: Picture, max_pixels: int) -> None:
        self._picture = picture
        self.width, self.height = picture.size
        self.reductions: tuple[int, ...] = (8, 4, 2, 1) if picture.format == "JPEG" else (1,)
        _check_size(self.height, self.width, max_pixels)

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        if reduction > 1:
            self._picture.draft(None, (self.width // reduction, self.height // reduction))
        found = np.asarray(rgb_picture(self._picture))
        return _given(found, -(-self.height // reduction), -(-self.width // reduction), into)


class _OpenCv:
    """An image that OpenCV decodes."""

    part = _all_of

    reductions: tuple[int, ...] = (1,)

    def __init__(self, data: bytes, height: int, width: int) -> None:
        self._data, self.height, self.width = data, height, width

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import cv2
        except ImportError as error:
            raise ImportError(f"decoder='opencv' needs OpenCV: {HINT}") from error
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        found: Any = cv2.imdecode(np.frombuffer(self._data, np.uint8), flags)
        if found is None:
            raise ValueError(f"no image that OpenCV could decode: {len(self._data)} bytes")
        return _given(found, self.height, self.width, into)


def _given(found: Pixels, height: int, width: int, into: Pixels | None) -> Pixels:
    if found.shape != (height, width, 3):
        raise ValueError(f"an image decoded to {found.shape}, where its header makes it {(height, width, 3)}")
    if into is None:
        return np.ascontiguousarray(found)
    into[...] = found
    return into
