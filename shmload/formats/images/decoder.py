"""ImageDecoder: decode image files into rows of a batch, with crop, resize, flip and normalization.

An image is decoded in two steps:

1. A library decodes the pixels, and only those that the crop needs if it can. Large JPEGs are shrunk to a half, a quarter or an
   eighth while they are decoded, where that is accurate enough.
2. `_core.resample` crops, resizes, mirrors and normalizes these pixels and writes them to the row in the requested layout.
   Coordinates are always pixels of the whole image, so decoding only a part changes no byte of the result.

Random parameters are drawn from the sample's own generator.

Crops follow torchvision. A `Window` describes a crop in pixels of the stored image. Where torchvision resizes and then crops,
one window describes both steps, so only the requested pixels are computed.

Libraries. JPEGs are decoded with the libjpeg-turbo that Pillow uses, called directly so that a part of an image can be decoded;
if it is not available, with simplejpeg (which hides its own libjpeg-turbo) or Pillow, which decode the whole image to the same
pixels. Pillow's wheels contain libjpeg-turbo as a shared library, and Linux distributions link Pillow with the system's.
`_core.jpeg` binds either at run time, unless it is too old or has another interface. All other formats are decoded with Pillow. The
format is recognized by the first bytes of a file, not by its name. Pillow converts other modes to RGB, except 16-bit images, which
Pillow would clip: their high byte is used.

Damaged files. libjpeg-turbo and simplejpeg report damage within a scan; Pillow silently invents the missing pixels. Only
simplejpeg reads every file to its end, so this module rejects truncated files before a decoder sees them. Headers are parsed before
any library allocates memory for pixels.

Restart markers. Entropy decoding is most of the work of decoding a JPEG, and Huffman codes can only be decoded from the start
of a scan or from a restart marker. `with_restart_markers` recodes a JPEG with a marker every 48 pixels or more, so that a crop
costs little more than its own bits (`src/jpeg_cut.h`). The recoded file has new Huffman tables and is usually smaller, and every
decoder returns the same pixels for it. Files are recoded once, when they are packed.

Sources: torchvision.transforms v1, RandomResizedCrop.get_params, Resize, CenterCrop; C. Szegedy et al., Going deeper with
convolutions, 2015; ITU-T T.81 (JPEG), annex B; W3C Portable Network Graphics (third edition), 5.
"""

from __future__ import annotations

import io
import math
import os
import random
import re
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import shmload
from shmload._core.jpeg import bind, decode, is_remark, recode
from shmload._core.resample import resample
from shmload.metrics import irregular_files

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# Least number of pixels between two markers. Measured at 95 kB, as fractions of the CPU time of a random crop and of the file's
# size without markers: one row 0.94 and 0.954, 48 pixels 0.79 and 0.961, 32 pixels 0.78 and 0.967.
_LEAST_WIDTHS: dict[str, int] = {"tile": 48, "row": 0}


def with_restart_markers(data: bytes, *, every: Literal["tile", "row"] = "tile") -> bytes:
    """Recode a JPEG without loss, so that a crop can be decoded without the pixels next to it.

    The coefficients do not change, so every decoder returns the same pixels. EXIF, profiles and all other metadata are copied byte
    by byte. The new file is sequential and has its own Huffman tables. With the same libjpeg-turbo, the same file always becomes
    the same bytes. A file that is not a JPEG, or that cannot be recoded without loss, is returned unchanged.

    Args:
        data: an encoded image.
        every: the distance of restart markers: "tile", as close to each other as divides a row of MCUs, but at least 48 pixels
            apart; "row", one after each row of MCUs.
    Returns:
        The new file, or `data`.
    Raises:
        ImportError: no suitable libjpeg-turbo is available.
        ValueError: `every` has another value.
    Cost: 28 ms per megabyte; the GIL is released.
    Thread/process safety: any number of callers.
    Example:
        >>> from pathlib import Path
        >>> import shmload
        >>> from shmload.formats import with_restart_markers
        >>> photo = (Path(shmload.__file__).parent / "data" / "coffee.jpg").read_bytes()
        >>> with_restart_markers(photo).count(bytes([0xFF, 0xD0]))
        24
        >>> with_restart_markers(b"GIF89a")
        b'GIF89a'
    """
    return recoded(data, every=every)[0]


def recoded(data: bytes, *, every: Literal["tile", "row"] = "tile") -> tuple[bytes, str]:
    """Return the result of `with_restart_markers` and the reason why the file is unchanged, "" if it was recoded."""
    if every not in _LEAST_WIDTHS:
        raise ValueError(f"every needs to be one of {tuple(_LEAST_WIDTHS)}; got {every!r}")
    if not data.startswith(JPEG):
        return data, "no JPEG"
    if why := unbound():
        raise ImportError(f"restart markers: {why}; {HINT}")
    try:
        header = jpeg_header(data)
        if header.height * header.width > MAX_PIXELS:
            return data, f"{header.height} x {header.width} pixels, more than {MAX_PIXELS}"
        return recode(data, least_width=_LEAST_WIDTHS[every]), ""
    except ValueError as error:
        return data, str(error)


Pixels = NDArray[np.uint8]  # (height, width, 3)
Encoded = bytes | bytearray | memoryview | Mapping[str, Any]  # an image file, or a picture as `datasets.Image` stores it
Box = tuple[int, int, int, int]  # (top, left, bottom, right)
HINT = "pip install 'shmload[images]'"
_KEPT_NBYTES = 1 << 26  # a thread keeps its memory for decoded pixels up to this size
_local = threading.local()


class Part(NamedTuple):
    """Some pixels of an image, and the (top, left) of the first one."""

    pixels: Pixels
    origin: tuple[int, int]


@dataclass
class OpenedImage(ABC):
    """An image whose size is known and whose pixels are not decoded yet.

    Attributes:
        reductions: the factors by which the decoder itself can shrink the image: powers of 2, including 1.
        is_irregular: the file violates its format but is read anyway; final only after decoding.
    """

    data: bytes
    height: int
    width: int
    is_strict: bool | None
    is_fast: bool
    reductions: tuple[int, ...] = (8, 4, 2, 1)
    is_irregular: bool = False

    @abstractmethod
    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        """Return the image, shrunk by the factor `reduction`; sizes are rounded up.

        Returns:
            `into`, or memory that the thread's next image overwrites.
        """

    def part(self, reduction: int, needed: Box) -> Part:
        """Return at least the needed pixels of the shrunk image, in memory that the thread's next image overwrites."""
        return Part(self.pixels(reduction), (0, 0))

    @abstractmethod
    def orientation(self) -> int:
        """Return the orientation by which Pillow's `ImageOps.exif_transpose` turns the image: 1 to 8, and 1 without one."""

    def size(self, reduction: int) -> tuple[int, int]:
        """Return height and width of the image shrunk by the factor `reduction`."""
        return -(-self.height // reduction), -(-self.width // reduction)


def memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of this thread for one image. It is reused because fresh pages would add a tenth to the decoding time."""
    if nbytes > _KEPT_NBYTES:
        return np.empty(nbytes, np.uint8)
    kept: NDArray[np.uint8] | None = getattr(_local, "kept", None)
    if kept is None or kept.size < nbytes:
        kept = _local.kept = np.empty(nbytes, np.uint8)
    return kept[:nbytes]


JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length field
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END, _SCAN = 0xD9, 0xDA
_LOSSLESS = 0xC3
_UNREADABLE = {  # kinds of JPEG that no libjpeg decodes, by the marker of the frame
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    0xCB: "a lossless JPEG with arithmetic coding",
}
_OTHERWISE = "Convert the file, or decode it with a function of your own, for example with imagecodecs"


class JpegHeader(NamedTuple):
    """The frame of a JPEG file, and the byte at which its first scan begins.

    Attributes:
        is_lossless: the file is JPEG Lossless, as in DICOM files, which not every libjpeg decodes.
        has_junk: there are bytes between two segments that belong to neither.
    """

    height: int
    width: int
    num_components: int
    scan_at: int
    is_lossless: bool = False
    has_junk: bool = False


def jpeg_header(data: bytes, *, is_strict: bool | None = None) -> JpegHeader:
    """Parse the markers of a JPEG file up to its first scan.

    Args:
        is_strict: reject bytes between two segments; otherwise they are skipped, as Pillow and libjpeg do.
    Raises:
        ValueError: the markers are damaged or truncated, or do not describe an image of 8 bits per channel; the message names the
            byte.
    """
    at, frame, is_lossless, has_junk = 2, None, False, False
    while True:
        if at + 4 > len(data):
            raise ValueError(f"a JPEG that ends at byte {len(data)}, before its image begins")
        if data[at] != 0xFF or data[at + 1] == 0:
            if is_strict:
                raise ValueError(f"a damaged JPEG: byte {at} is {data[at]:#04x}, where a marker has to begin")
            has_junk = True
            next_at = data.find(b"\xff", at + 1)
            at = len(data) if next_at < 0 else next_at
            continue
        marker = data[at + 1]
        if marker == 0xFF:  # markers may be padded
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker == _END or length < 2 or at + 2 + length > len(data):
            raise ValueError(f"a damaged JPEG: the segment at byte {at} does not end within the {len(data)} bytes of the file")
        if marker in _FRAMES:
            if marker in _UNREADABLE:
                raise ValueError(f"{_UNREADABLE[marker]}, a kind that libjpeg does not decode. {_OTHERWISE}")
            if length < 8:
                raise ValueError(f"a damaged JPEG: the frame at byte {at} has {length} bytes, needs 8")
            precision, height, width, num_components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8:
                raise ValueError(f"a JPEG of {precision} bits a channel; those of 8 can be decoded. {_OTHERWISE}")
            if not height or not width:
                raise ValueError(f"a JPEG of {height} x {width} pixels, as the frame at byte {at} says")
            frame, is_lossless = (height, width, num_components), marker == _LOSSLESS
        if marker == _SCAN:
            if frame is None:
                raise ValueError(f"a damaged JPEG: its scan at byte {at} has no frame before it")
            return JpegHeader(*frame, at, is_lossless, has_junk)
        at += 2 + length


def jpeg_is_whole(data: bytes, header: JpegHeader) -> bool:
    """Return whether the end marker is present. Its two bytes cannot occur within a scan."""
    return data.rfind(b"\xff\xd9") > header.scan_at


class PngDamage(ValueError):
    """The chunks of a PNG file are damaged. Pillow may be able to read the picture anyway."""


def png_header(data: bytes) -> tuple[int, int]:
    """Return height and width of a PNG file after verifying the checksum of every chunk.

    Raises:
        PngDamage: a checksum does not match, or the file ends before its last chunk; the message names the byte.
    """
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise PngDamage("a damaged PNG: byte 8 begins no header")
    view = memoryview(data)
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        if at + 12 + length > len(data):
            break
        if zlib.crc32(view[at + 4 : at + 8 + length]) != int.from_bytes(data[at + 8 + length : at + 12 + length]):
            raise PngDamage(f"a damaged PNG: the chunk at byte {at} has another checksum than it says")
        if data[at + 4 : at + 8] == b"IEND":
            width, height = struct.unpack_from(">II", data, 16)
            return height, width
        at += 12 + length
    raise PngDamage(f"a PNG cut off: the chunk at byte {at} does not end within the {len(data)} bytes of the file")


def check_pixels(data: bytes) -> None:
    """Verify the compressed pixels of a damaged PNG file with the checksum inside the zlib stream.

    Pillow ignores the chunk checksums of such a file, and it may stop at the last row, before the checksum of the stream.

    Raises:
        PngDamage: the pixels are damaged. Truncated pixels pass here, because Pillow rejects a file unless all rows are there.
    """
    stream, at, is_sound = zlib.decompressobj(), len(PNG), True
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        end = at + 8 + length
        if data[at + 4 : at + 8] == b"IDAT":
            if end + 4 <= len(data):
                is_sound &= zlib.crc32(data[at + 4 : end]) == int.from_bytes(data[end : end + 4])
            rest = data[at + 8 : end]
            try:
                while rest and not stream.eof:
                    stream.decompress(rest, 1 << 16)  # in pieces, because the decompressed size is unknown
                    rest = stream.unconsumed_tail
            except zlib.error as error:
                raise PngDamage(f"a damaged PNG: the pixels in the chunk at byte {at}: {error}") from None
        at = end + 4
    if not (is_sound or stream.eof):
        raise PngDamage("a damaged PNG: a chunk of pixels has another checksum than it says, and the pixels have no end")


LEAST_VERSION = (2, 1)  # of libjpeg-turbo: the oldest version that was tested


@cache
def unbound() -> str:
    """Bind Pillow's libjpeg. Return why it cannot be used, or "" on success. The result is cached for the process."""
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


@dataclass
class _LibraryJpeg(OpenedImage):
    """A JPEG decoded by a library that does not report its orientation."""

    scan_at: int = 0

    def orientation(self) -> int:
        if all(self.data.find(sign, 0, self.scan_at) < 0 for sign in (b"Exif", b"tiff:Orientation")):
            return 1  # Pillow takes longer to open a file, and would not find an orientation either
        return _orientation(open_picture(self.data))


class LibJpeg(_LibraryJpeg):
    """A JPEG that Pillow's libjpeg-turbo decodes, as far as it is needed."""

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        height, width = self.size(reduction)
        if into is None:
            into = memory(height * width * 3).reshape(height, width, 3)
        self._decode(into.reshape(-1), reduction, (0, 0, height, width))
        return into

    def part(self, reduction: int, needed: Box) -> Part:
        top, _, bottom, _ = needed
        into = memory((bottom - top) * self.size(reduction)[1] * 3)
        left, right = self._decode(into, reduction, needed)
        pixels = into[: (bottom - top) * (right - left) * 3].reshape(bottom - top, right - left, 3)
        return Part(pixels, (top, left))

    def _decode(self, into: NDArray[np.uint8], reduction: int, needed: Box) -> tuple[int, int]:
        if why := unbound():
            raise ImportError(f"decoder='libjpeg': {why}; {HINT}")
        whole = self.size(reduction)
        quality: dict[str, Any] = {"is_strict": self.is_strict, "is_fast": self.is_fast}
        first, end, num_passed_over = decode(self.data, into, whole, needed, reduction=reduction, **quality)
        self.is_irregular |= num_passed_over > 0
        return first, end


T = TypeVar("T")
LIBRARIES = ("auto", "libjpeg", "simplejpeg", "pillow")


def open_image(data: bytes, library: str, max_pixels: int, *, is_strict: bool | None, is_fast: bool) -> OpenedImage:
    """Parse the header of an image file and choose the library that decodes it.

    Raises:
        ValueError: the file is empty, damaged, not an image, or larger than `max_pixels`.
        ImportError: no library for this format is installed.
    """
    if not data:
        raise ValueError("an empty file")
    if data.startswith(JPEG):
        header = jpeg_header(data, is_strict=is_strict)
        _check_size(header.height, header.width, max_pixels)
        given: dict[str, Any] = {"is_strict": is_strict, "is_fast": is_fast, "is_irregular": header.has_junk}
        is_lossless = header.is_lossless
        is_usual = header.num_components in (1, 3) and not is_lossless  # only Pillow converts other images to RGB
        chosen = _jpeg_library(library) if is_usual else "pillow"
        if is_strict is not False and not jpeg_is_whole(data, header):
            raise ValueError(f"a JPEG cut off: {len(data)} bytes without an end marker")
        if chosen != "pillow":
            opened = _Jpeg if chosen == "simplejpeg" else LibJpeg
            return opened(data, header.height, header.width, scan_at=header.scan_at, **given)
    else:
        given, is_lossless = {"is_strict": is_strict, "is_fast": is_fast}, False
        if data.startswith(PNG):
            try:
                _check_size(*png_header(data), max_pixels)
            except PngDamage:
                if is_strict:
                    raise
                check_pixels(data)
                given["is_irregular"] = True
    picture = open_picture(data)
    width, height = picture.size
    _check_size(height, width, max_pixels)
    reductions = (8, 4, 2, 1) if picture.format == "JPEG" and not is_lossless else (1,)
    return _Pillow(data, height, width, reductions=reductions, picture=picture, is_lossless=is_lossless, **given)


def file_bytes(data: Encoded) -> bytes:
    """Return the bytes of an image file, given as `bytes`, as another buffer, or as a picture that `datasets.Image` stores.

    Raises:
        ValueError: `data` is something else, or a stored picture without its bytes.
    """
    if isinstance(data, Mapping):
        if "bytes" not in data:
            raise ValueError(
                f"ImageDecoder takes the bytes of a file, or a dict that has them as 'bytes'; this one has {sorted(data)}"
            )
        if data["bytes"] is None:
            raise ValueError(
                f"a picture stored as its path alone, {data.get('path')!r}, without its bytes. Store the bytes: datasets does with "
                "embed_external_files=True; or read the file yourself and give ImageDecoder what it holds"
            )
        data = data["bytes"]
    if isinstance(data, bytes):
        return data
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # whether it is a buffer shows here
    except TypeError:
        view = None
    if view is None or view.itemsize != 1 or view.ndim != 1:
        raise ValueError(
            f"ImageDecoder takes the bytes of an image file, got {type(data).__name__}. Of a path read the file; of pictures that "
            "datasets has decoded take datasets.Image(decode=False)"
        )
    return view.tobytes()


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
    """Open an image file with Pillow, without decoding it.

    Raises:
        ValueError: Pillow does not recognize the format.
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
    """Convert the image to Pillow's mode RGB.

    Raises:
        ValueError: the range of its values is unknown.
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


def _orientation(picture: Picture) -> int:
    """Return the orientation that EXIF, or else XMP, contains according to Pillow: 1 to 8; 1 without one."""
    found = picture.getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


def checked(read: Callable[[], T]) -> T:
    """Return `read()`, and turn any error that a library raises about a file into a ValueError."""
    try:
        return read()
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and errors of its own
        raise ValueError(f"{type(error).__name__}: {error}") from error


_BAD_PROFILE = "bad ICC marker"  # part of libjpeg-turbo's warning


class _Jpeg(_LibraryJpeg):
    """A JPEG that simplejpeg decodes."""

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import simplejpeg
        except ImportError as error:
            raise ImportError(f"decoder='simplejpeg' needs simplejpeg: {HINT}") from error
        height, width = self.size(reduction)
        if into is None:
            into = memory(height * width * 3).reshape(height, width, 3)
        options: dict[str, Any] = {"buffer": into, "fastdct": self.is_fast, "fastupsample": self.is_fast}
        if reduction > 1:
            options |= {"min_height": height, "min_width": width}
        try:
            found: Pixels = simplejpeg.decode_jpeg(self.data, "RGB", strict=True, **options)
        except ValueError as error:
            is_of_profile = _BAD_PROFILE in str(error)  # the other libraries ignore the profile
            if not is_of_profile:
                if self.is_strict or (self.is_strict is None and not is_remark(str(error))):
                    raise
                self.is_irregular = True
            # simplejpeg raises this even without `strict`, and a later warning may report real damage
            if is_of_profile or is_remark(str(error)):
                library = "pillow" if unbound() else "libjpeg"
                other = open_image(self.data, library, self.height * self.width, is_strict=self.is_strict, is_fast=self.is_fast)
                found = other.pixels(reduction, into=into)
                self.is_irregular |= other.is_irregular
                return found
            into.fill(0)  # simplejpeg gives up silently and leaves the previous image in this memory
            found = simplejpeg.decode_jpeg(self.data, "RGB", strict=False, **options)
        if found.shape != into.shape:
            raise ValueError(f"a JPEG decoded to {found.shape[:2]}, where its header makes it {into.shape[:2]}")
        return into


@dataclass
class _Pillow(OpenedImage):
    """An image that Pillow decodes."""

    picture: Any = None
    is_lossless: bool = False

    def orientation(self) -> int:
        if self.picture.format not in ("JPEG", "MPO"):  # JPEG has it in its header, and `draft` works only before loading
            self.picture.load()  # as `exif_transpose` does: a TIFF is turned by that, and a PNG may have its EXIF at the end
        return _orientation(self.picture)

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        if reduction > 1:
            self.picture.draft(None, (self.width // reduction, self.height // reduction))
        try:
            found = np.asarray(rgb_picture(self.picture))
        except OSError as error:
            if not self.is_lossless:
                raise
            raise ValueError(f"a lossless JPEG, which this Pillow does not decode ({error}). {_OTHERWISE}") from error
        if found.shape != (*self.size(reduction), 3):
            raise ValueError(f"an image decoded to {found.shape}, where its header makes it {(*self.size(reduction), 3)}")
        if into is None:
            return np.ascontiguousarray(found)
        into[...] = found
        return into


Size = tuple[int, int]
_ATTEMPTS = 10


class Window(NamedTuple):
    """A crop: `box` (top, left, height, width) is resampled to `size`, without pixels outside `clip` (top, left, bottom, right)."""

    size: Size
    box: tuple[float, float, float, float]
    clip: tuple[int, int, int, int]


class Crop(Protocol):
    """The protocol of crops, which choose a window of an image. Your own crop must be picklable."""

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Height and width of every result; None if they depend on the image."""

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return the window of an image. If it is smaller than `shape`, the result is padded with black (`middle_of`).

        Args:
            height, width: size of the image in pixels.
            rng: the sample's generator.
        Returns:
            `Window(size, box, clip)`: the box (top, left, height, width) of the image is resampled to the size (height, width);
            pixels outside the clip (top, left, bottom, right) are ignored.
        """


@dataclass(frozen=True)
class _SizedCrop:
    size: int | Sequence[int]

    def __post_init__(self) -> None:
        _pair(self.size, type(self).__name__)

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Height and width of every result."""
        return _pair(self.size, type(self).__name__)


@dataclass(frozen=True)
class RandomResizedCrop(_SizedCrop):
    """Crop a random part of the image, of random area and aspect ratio, and resize it, with torchvision's distribution.

    As in torchvision, the part is cut out before it is resized, so pixels next to it have no influence.

    Args:
        size: size of the result, (height, width) or one number for both.
        scale: least and greatest share of the image's area.
        ratio: least and greatest aspect ratio, width over height; drawn uniformly in its logarithm.
    Raises:
        ValueError: an argument is out of range.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"RandomResizedCrop: scale needs 0 < least <= most <= 1; got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"RandomResizedCrop: ratio needs 0 < least <= most; got {self.ratio}")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return a window of an image of this `height` and `width`, drawn from `rng`."""
        top, left, box_height, box_width = self._box(height, width, rng)
        clip = (top, left, top + box_height, left + box_width)
        return Window(_pair(self.size, "RandomResizedCrop"), (float(top), float(left), float(box_height), float(box_width)), clip)

    def _box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        least, most = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = height * width * _between(*self.scale, rng)
            aspect = math.exp(_between(least, most, rng))
            box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(_between(0, height - box_height + 1, rng))
                return top, int(_between(0, width - box_width + 1, rng)), box_height, box_width
        box_height, box_width = height, width
        if width / height < self.ratio[0]:
            box_height = max(1, min(height, round(width / self.ratio[0])))
        elif width / height > self.ratio[1]:
            box_width = max(1, min(width, round(height * self.ratio[1])))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


@dataclass(frozen=True)
class Resize(_SizedCrop):
    """Resize the whole image.

    Args:
        size: (height, width), which may change the aspect ratio; or the length of the shorter side, which keeps the aspect ratio,
            so that results differ in shape.
    Raises:
        ValueError: an argument is out of range.
    """

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Height and width of every result; None if they depend on the image."""
        return (None, None) if isinstance(self.size, int) else super().shape

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return a window with all of an image of this `height` and `width`; `rng` is not used."""
        size = _shorter(self.size, height, width) if isinstance(self.size, int) else _pair(self.size, "Resize")
        return Whole().window(height, width, rng)._replace(size=size)


@dataclass(frozen=True)
class CenterCrop(_SizedCrop):
    """Crop the middle of the image. A smaller image is padded with black, as in torchvision.

    Args:
        size: size of the result, (height, width) or one number for both.
        resize: first resize the image so that its shorter side has this length; usually 256 for a size of 224.
    Raises:
        ValueError: an argument is out of range.
    """

    resize: int | None = None

    def __post_init__(self) -> None:
        size = _pair(self.size, "CenterCrop")
        if self.resize is not None and self.resize < max(size):
            raise ValueError(f"CenterCrop: resize is the shorter side and needs to be at least size; got {self.resize} for {size}")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return the middle of an image of this `height` and `width`; `rng` is not used."""
        size = _pair(self.size, "CenterCrop")
        resized = (height, width) if self.resize is None else _shorter(self.resize, height, width)
        size = min(size[0], resized[0]), min(size[1], resized[1])
        top, left = round((resized[0] - size[0]) / 2), round((resized[1] - size[1]) / 2)
        down, along = height / resized[0], width / resized[1]
        box = (top * down, left * along, size[0] * down, size[1] * along)
        return Window(size, box, (0, 0, height, width))


@dataclass(frozen=True)
class Whole:
    """The image without crop or resize."""

    shape: tuple[None, None] = (None, None)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        return Window((height, width), (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


def middle_of(shape: Size, size: Size, *, is_flipped: bool) -> tuple[slice, slice]:
    """Return the rows and columns of a result of `shape` that a window of a smaller `size` fills.

    If the margin is odd, the extra pixel is at the bottom and right; for a mirrored image at the left, because the padding is
    mirrored, too.
    """
    top, left = (shape[0] - size[0]) // 2, (shape[1] - size[1] + is_flipped) // 2
    return slice(top, top + size[0]), slice(left, left + size[1])


def _between(least: float, most: float, rng: np.random.Generator) -> float:
    """Draw a number from [least, most). `rng.uniform` and `rng.integers` draw the same, but take twenty times as long."""
    return least + (most - least) * rng.random()


def _pair(size: int | Sequence[int], name: str) -> Size:
    """Return `size` as (height, width)."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name}: size needs one or two whole numbers of pixels, at least 1; got {size!r}")
    return sides[0], sides[1]


def _shorter(side: int, height: int, width: int) -> Size:
    """Return height and width of an image whose shorter side becomes `side`, rounded down as torchvision does."""
    if width <= height:
        return int(side * height / width), side
    return side, int(side * width / height)


Shape = tuple[int | None, ...]
Place = Callable[[tuple[int, ...]], NDArray[Any]]  # shape -> the array that the image is written to
MAX_PIXELS = 89_478_485  # of an image, Pillow's limit: 256 MiB decoded
_MARGIN = 2  # least size of a shrunk image, in sizes of the result: libjpeg and the triangle filter then nearly agree
_LEAST_SHRUNK = 16  # pixels of a side: the library's rounding would choose another reduction for smaller ones
_STRAIGHT: dict[int, Callable[[Pixels], Pixels]] = {  # turns a stored image upright, by EXIF orientation
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels.swapaxes(0, 1)[:, ::-1],
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels.swapaxes(0, 1)[::-1],
}


@dataclass(frozen=True)
class ImageDecoder:
    """Decode an image file into an array: `decoder(data)`. Immutable: can be compared, pickled, and shared by threads.

    Random parameters are drawn from `sample_rng()`, and outside a ShmLoader from Python's `random`, which torch's DataLoader seeds.

    Args:
        crop: RandomResizedCrop, CenterCrop, Resize or your own Crop; None keeps the image as it is.
        flip: probability of mirroring the image, left to right.
        normalize: (mean, standard deviation), each three numbers on the scale from 0 to 1; the result is float32.
        layout: "CHW", as torch's layers expect it, or "HWC".
        dtype: "uint8", or "float32": from 0 to 1, or normalized. Default: float32 if normalized.
        decoder: "auto", "libjpeg" (Pillow's, which decodes only what the crop needs), "simplejpeg" or "pillow".
        scaled: let the JPEG decoder shrink large images to a half, a quarter or an eighth, as long as the crop stays twice as large
            as the result: mean deviation below 2 levels of 255. Otherwise, and for smaller images, each level differs from that of
            Pillow's BILINEAR by at most one.
        fast: use the fast DCT and chroma upsampling, which take a tenth less time: mean deviation 1 to 2 levels.
        upright: turn images according to their EXIF or XMP orientation, in every format, as Pillow's `ImageOps.exif_transpose`
            does; otherwise they stay as stored, as in torchvision.
        strict: how to treat invalid files. None (default) accepts a file that violates its format if Pillow reads it and its
            picture is complete (bytes between the segments of a JPEG, a PNG without its end), and counts it in
            `stats()["num_irregular"]`; it rejects JPEG files that are damaged or truncated, as far as the library can tell. True
            rejects all of these. False also reads damaged JPEG files; the library invents the missing pixels. Damage below the
            crop, and next to it in a file with restart markers, is not noticed because it is not read.
        max_pixels: largest size of an image; a larger one is rejected before any memory is allocated.
    Raises:
        ValueError: an option is invalid; (when called) a file is not a valid image.
    Thread/process safety: any number of callers.
    Example:
        >>> from shmload.formats import ImageDecoder, RandomResizedCrop
        >>> ImageDecoder(RandomResizedCrop(224), flip=0.5, layout="HWC").spec
        ('uint8', (224, 224, 3))
    """

    crop: Crop | None = None
    flip: float = 0.0
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    layout: Literal["CHW", "HWC"] = "CHW"
    dtype: Literal["uint8", "float32"] | None = None
    decoder: Literal["auto", "libjpeg", "simplejpeg", "pillow"] = "auto"
    scaled: bool = True
    fast: bool = False
    upright: bool = False
    strict: bool | None = None
    max_pixels: int = MAX_PIXELS
    _crop: Crop = field(init=False, repr=False, compare=False)
    _levels: NDArray[np.float32] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is a probability and needs to be 0 to 1; got {self.flip}")
        for name, choices in (("layout", ("CHW", "HWC")), ("dtype", (None, "uint8", "float32")), ("decoder", LIBRARIES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} needs to be one of {choices}; got {getattr(self, name)!r}")
        if self.normalize is not None and self.dtype == "uint8":
            raise ValueError("normalize makes float32; leave dtype away or give dtype='float32'")
        object.__setattr__(self, "_crop", self.crop or Whole())
        object.__setattr__(self, "_levels", self._table())

    @property
    def spec(self) -> tuple[str, Shape]:
        """Type and shape of the result, as in a schema: ("uint8", (3, 224, 224)). A None in the shape depends on the image."""
        height, width = self._crop.shape
        shape = (3, height, width) if self.layout == "CHW" else (height, width, 3)
        return "uint8" if self._levels is None else "float32", shape

    def __call__(self, data: Encoded) -> NDArray[Any]:
        """Return the decoded image as a new array of the shape and dtype that `spec` describes. `data` is as for `decode`."""
        return self.decode(data, lambda shape: np.empty(shape, self.spec[0]))

    def decode(self, data: Encoded, place: Place) -> NDArray[Any]:
        """Decode an image file into the array that `place` returns. It is called once the header is valid and the shape is known.

        Args:
            data: an encoded image: bytes, another buffer of them, or a dict that has them as "bytes", as Hugging Face's
                `datasets.Image` stores pictures.
            place: shape -> a writable array of that shape and of the dtype that `spec` describes.
        Returns:
            The array that `place` returned.
        Raises:
            ValueError: the file is not a valid image, or `data` is not a file.
            ImportError: no library for this format is installed.
        """
        content = file_bytes(data)
        image = checked(lambda: open_image(content, self.decoder, self.max_pixels, is_strict=self.strict, is_fast=self.fast))
        out = self._decoded(image, place)
        if image.is_irregular:
            irregular_files.add()
        return out

    def _decoded(self, image: OpenedImage, place: Place) -> NDArray[Any]:
        turned = checked(image.orientation) if self.upright else 1
        stored = (image.height, image.width)
        height, width = stored if turned < 5 else stored[::-1]
        rng = generator()
        window = self._crop.window(height, width, rng)
        is_flipped = self.flip > 0 and rng.random() < self.flip
        size = tuple(side or n for side, n in zip(self._crop.shape, window.size, strict=True))
        out = place((3, *size) if self.layout == "CHW" else (*size, 3))
        middle = out if size == window.size else self._middle(out, window.size, is_flipped=is_flipped)
        is_all = window.size == stored and window.box == (0.0, 0.0, *map(float, stored))
        is_plain = self.layout == "HWC" and self._levels is None and turned == 1 and not is_flipped
        if is_all and is_plain and middle.flags.c_contiguous:  # the decoded pixels are the result
            checked(lambda: image.pixels(1, into=middle))
            return out
        room = min(window.box[2] / window.size[0], window.box[3] / window.size[1]) / _MARGIN
        room = min(room, image.height / _LEAST_SHRUNK, image.width / _LEAST_SHRUNK)
        reduction = next((n for n in image.reductions if n <= room), 1) if self.scaled else 1
        whole = -(-height // reduction), -(-width // reduction)
        window = _shrunk(window, reduction, whole)
        if turned > 1:
            part = Part(np.ascontiguousarray(_STRAIGHT[turned](checked(lambda: image.pixels(reduction)))), (0, 0))
        else:
            part = checked(lambda: image.part(reduction, _needed(window)))
        self._resample(part, whole, middle, window, is_flipped=is_flipped)
        return out

    def _middle(self, out: NDArray[Any], size: tuple[int, int], *, is_flipped: bool) -> NDArray[Any]:
        """Fill the result with black, and return the part of it that a window smaller than the crop fills."""
        height, width = out.shape[1:] if self.layout == "CHW" else out.shape[:2]
        rows, columns = middle_of((height, width), size, is_flipped=is_flipped)
        black = np.zeros(3, out.dtype) if self._levels is None else self._levels[:, 0]
        out[...] = black[:, None, None] if self.layout == "CHW" else black
        return out[:, rows, columns] if self.layout == "CHW" else out[rows, columns]

    def _resample(self, part: Part, whole: Size, out: NDArray[Any], window: Window, *, is_flipped: bool) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        resample(
            part.pixels,
            target,
            *window,
            origin=part.origin,
            whole=whole,
            is_flipped=is_flipped,
            is_planar=self.layout == "CHW",
            levels=self._levels,
        )
        if target is not out:
            out[...] = target

    def _table(self) -> NDArray[np.float32] | None:
        """Return the output value of each level of each channel; None if levels do not change."""
        if self.normalize is None and self.dtype != "float32":
            return None
        mean, deviation = ((0,) * 3, (1,) * 3) if self.normalize is None else self.normalize
        if len(mean) != 3 or len(deviation) != 3 or not all(each > 0 for each in deviation):
            raise ValueError(f"normalize needs three means and three standard deviations above 0; got {self.normalize}")
        return levels_of(mean, deviation)


def levels_of(mean: Sequence[float], deviation: Sequence[float]) -> NDArray[np.float32]:
    """Return the normalized value of each level of each channel, by torchvision's arithmetic: shape (channels, 256)."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    return (levels - np.array(mean, np.float32)[:, None]) / np.array(deviation, np.float32)[:, None]


def generator() -> np.random.Generator:
    """Return the sample's own generator; outside a ShmLoader, one seeded from `random`."""
    try:
        return shmload.sample_rng()
    except RuntimeError:
        return np.random.default_rng(random.getrandbits(128))


def _shrunk(window: Window, reduction: int, whole: Size) -> Window:
    """Scale a window to an image shrunk by the factor `reduction`, whose (height, width) is `whole`."""
    if reduction == 1:
        return window
    top, left, box_height, box_width = (each / reduction for each in window.box)
    clip = (
        window.clip[0] // reduction,
        window.clip[1] // reduction,
        min(whole[0], -(-window.clip[2] // reduction)),
        min(whole[1], -(-window.clip[3] // reduction)),
    )
    return Window(window.size, (top, left, box_height, box_width), clip)


def _needed(window: Window) -> Box:
    """Return the pixels that resampling a window reads: its box and half a triangle filter around it, within its clip."""
    found = []
    for axis in (0, 1):
        start, length, low, high = window.box[axis], window.box[axis + 2], window.clip[axis], window.clip[axis + 2]
        radius = max(1.0, length / window.size[axis])
        found.append((max(low, math.floor(start - radius)), min(high, math.ceil(start + length + radius))))
    return found[0][0], found[1][0], found[0][1], found[1][1]
