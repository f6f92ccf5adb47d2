"""ImageDecoder: from the bytes of an image file to a row of a batch, in two passes over the pixels.

The library decodes, at a half, a quarter or an eighth where that is exact enough, and if it can only what the window needs;
`_core.resample` takes the window out of that and resizes, mirrors, normalizes and lays it out where it is delivered. It reckons in
pixels of the whole image either way, so that what was left out changes no byte. Parameters are drawn from the sample's own
generator.

Which part of an image becomes the result, and of what size: torchvision's crops as windows.

A window says everything that resampling needs to know, in pixels of the image as it is stored. A crop that torchvision makes in two
steps (resize, then cut) is one window here: no pixel is computed that is not wanted.

Source: torchvision.transforms v1, RandomResizedCrop.get_params, Resize, CenterCrop; after C. Szegedy et al., Going deeper with
convolutions, 2015.

JPEGs with restart markers, of which a crop is decoded without the bits beside it: files are coded so once, when they are packed.

Entropy decoding is most of the work of decoding, and Huffman codes can only be read from where nothing before matters: behind a
restart marker. With a marker after every 48 pixels or more a crop costs its own bits and few more (`src/jpeg_cut.h`), and the
file, whose Huffman tables are made anew for it, is smaller than most were. Every decoder makes the same pixels of it.

From the bytes of a file to RGB pixels: which library decodes, and what it is not given.

JPEG goes to Pillow's libjpeg-turbo, called directly so that a part of an image can be decoded, else to simplejpeg. Both decode into
memory of ours and report damage within a scan; Pillow makes something up for what is damaged and says nothing. simplejpeg reads
every file to its end; the others are kept from files that are cut off. PNG and all others go to Pillow. What a file is, its
bytes say, not its name. Conversions to RGB are Pillow's, except that of 16 bits, which there is a clipping: the high byte is taken.

What every library's images have in common: a size, pixels or a part of them, and the memory these are decoded into.

What the head of a file says of the image in it, read before any library makes room for the pixels.

Source: ITU-T T.81 (JPEG), annex B; W3C Portable Network Graphics (third edition), 5.

The libjpeg-turbo that Pillow brings, called directly: it decodes what a crop needs of a JPEG, and leaves the rest out.

simplejpeg has a libjpeg-turbo of its own, but hides it. Pillow's wheels carry one as a shared library, and distributions link
Pillow with the system's. `_core.jpeg` binds whichever it is at run time; where there is none, or an old one, or one of another
interface, JPEGs are decoded whole, by simplejpeg or Pillow: the same pixels.
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

# Pixels between two markers. Measured at 95 kB, CPU of a random crop and size of the file: a row 0.94 and 0.954 of what they were,
# 48 pixels 0.79 and 0.961, 32 pixels 0.78 and 0.967.
_LEAST_WIDTHS: dict[str, int] = {"tile": 48, "row": 0}


def with_restart_markers(data: bytes, *, every: Literal["tile", "row"] = "tile") -> bytes:
    """A JPEG coded anew without loss, so that crops of it are decoded without what lies beside them.

    The coefficients stay what they are, and so do the pixels in every decoder; EXIF, profiles and all else that describes the
    image are kept byte by byte. The new file is sequential, its Huffman tables are its own, and the same file always becomes the
    same bytes with the same libjpeg-turbo. What cannot be done without loss, and what is no JPEG, is returned as it was given.

    Args:
        data: an encoded image.
        every: where restart markers stand: "tile", as near to each other as a row of MCUs divides, but at least 48 pixels apart;
            "row", after each row of MCUs.
    Returns:
        The new file, or `data`.
    Raises:
        ImportError: there is no libjpeg-turbo that could do it.
        ValueError: `every` is neither.
    Cost: 28 ms a megabyte; the GIL is released.
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
    """`with_restart_markers`, and why a file is returned as it was given; "" if it is not."""
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
Encoded = bytes | bytearray | memoryview | Mapping[str, Any]  # a file, or a picture as `datasets.Image` stores it
Box = tuple[int, int, int, int]  # (top, left, bottom, right)
HINT = "pip install 'shmload[images]'"
_KEPT_NBYTES = 1 << 26  # of decoded pixels that a thread keeps its memory for
_local = threading.local()


class Part(NamedTuple):
    """Some pixels of an image, and the (top, left) they begin at."""

    pixels: Pixels
    origin: tuple[int, int]


@dataclass
class OpenedImage(ABC):
    """An image whose size is known and whose pixels are not decoded yet.

    Attributes:
        reductions: by how much its decoder itself can shrink it: powers of 2, 1 among them.
        is_irregular: the file breaks a rule of its format and is read all the same; known for certain once it is decoded.
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
        """The image, shrunk to a `reduction`-th, rounded up.

        Returns:
            `into`, or memory that the thread's next image overwrites.
        """

    def part(self, reduction: int, needed: Box) -> Part:
        """At least the needed pixels of the shrunk image, in memory that the thread's next image overwrites."""
        return Part(self.pixels(reduction), (0, 0))

    @abstractmethod
    def orientation(self) -> int:
        """Return the orientation by which Pillow's `ImageOps.exif_transpose` turns the image: 1 to 8, and 1 without one."""

    def size(self, reduction: int) -> tuple[int, int]:
        """Height and width, shrunk to a `reduction`-th."""
        return -(-self.height // reduction), -(-self.width // reduction)


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
_LOSSLESS = 0xC3
_UNREADABLE = {  # kinds of JPEG that no libjpeg decodes, by the marker of the frame
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    0xCB: "a lossless JPEG with arithmetic coding",
}
_OTHERWISE = "Convert the file, or decode it with a function of your own, for example with imagecodecs"


class JpegHeader(NamedTuple):
    """A JPEG file's frame, and at which byte its first scan begins.

    Attributes:
        is_lossless: JPEG Lossless, as in DICOM files, which not every libjpeg decodes.
        has_junk: bytes that belong to no segment lie between two segments.
    """

    height: int
    width: int
    num_components: int
    scan_at: int
    is_lossless: bool = False
    has_junk: bool = False


def jpeg_header(data: bytes, *, is_strict: bool | None = None) -> JpegHeader:
    """Reads the markers of a JPEG file up to its first scan.

    Args:
        is_strict: refuse bytes between two segments; else they are skipped, as Pillow and libjpeg skip them.
    Raises:
        ValueError: they are damaged or cut off, or no image of 8 bits a channel follows; with the byte where that shows.
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
    """Whether the end marker is there. Within a scan its two bytes cannot occur."""
    return data.rfind(b"\xff\xd9") > header.scan_at


class PngDamage(ValueError):
    """A PNG file whose chunks are not as they should be. Pillow may read its picture all the same."""


def png_header(data: bytes) -> tuple[int, int]:
    """Height and width of a PNG file, every chunk of which has the checksum it says.

    Raises:
        PngDamage: one has not, or the file ends before its last; with the byte where that shows.
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
    """Check the compressed pixels of a PNG file whose chunks are not sound against the checksum within them.

    Pillow ignores the checksums of these chunks, and it may stop at the last row, before it has read the one within.

    Raises:
        PngDamage: they are damaged. Pillow judges pixels that are cut off, and refuses the file unless all are there.
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
                    stream.decompress(rest, 1 << 16)  # a piece at a time: how much it makes is unknown
                    rest = stream.unconsumed_tail
            except zlib.error as error:
                raise PngDamage(f"a damaged PNG: the pixels in the chunk at byte {at}: {error}") from None
        at = end + 4
    if not (is_sound or stream.eof):
        raise PngDamage("a damaged PNG: a chunk of pixels has another checksum than it says, and the pixels have no end")


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


@dataclass
class _LibraryJpeg(OpenedImage):
    """A JPEG that a library decodes which says nothing of its orientation."""

    scan_at: int = 0

    def orientation(self) -> int:
        if all(self.data.find(sign, 0, self.scan_at) < 0 for sign in (b"Exif", b"tiff:Orientation")):
            return 1  # and Pillow, which takes longer to open a file, would find no more
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
    """Looks at a file's head.

    Raises:
        ValueError: it is empty, damaged, no image, or larger than `max_pixels`.
        ImportError: there is no library for it.
    """
    if not data:
        raise ValueError("an empty file")
    if data.startswith(JPEG):
        header = jpeg_header(data, is_strict=is_strict)
        _check_size(header.height, header.width, max_pixels)
        given: dict[str, Any] = {"is_strict": is_strict, "is_fast": is_fast, "is_irregular": header.has_junk}
        is_lossless = header.is_lossless
        is_usual = header.num_components in (1, 3) and not is_lossless  # others Pillow alone makes RGB
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
    """Return the bytes of an image file: of `bytes`, of another buffer, or of a picture as `datasets.Image` stores it.

    Raises:
        ValueError: it is something else, or a stored picture that has no bytes.
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
        ValueError: its values have no known range.
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
    """Return the orientation of EXIF, or else of XMP, as Pillow finds it: 1 to 8; 1 if there is none."""
    found = picture.getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


def checked(read: Callable[[], T]) -> T:
    """What `read` gives; whatever a library raises about a file is a ValueError."""
    try:
        return read()
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Pillow has OSError, SyntaxError, struct.error and its own
        raise ValueError(f"{type(error).__name__}: {error}") from error


_BAD_PROFILE = "bad ICC marker"  # of libjpeg-turbo's warning


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
            is_of_profile = _BAD_PROFILE in str(error)  # which the other libraries do not look at
            if not is_of_profile:
                if self.is_strict or (self.is_strict is None and not is_remark(str(error))):
                    raise
                self.is_irregular = True
            # an error to simplejpeg even if it is not strict, and the next warning may be of damage
            if is_of_profile or is_remark(str(error)):
                library = "pillow" if unbound() else "libjpeg"
                other = open_image(self.data, library, self.height * self.width, is_strict=self.is_strict, is_fast=self.is_fast)
                found = other.pixels(reduction, into=into)
                self.is_irregular |= other.is_irregular
                return found
            into.fill(0)  # where it gives up it says nothing, and leaves what was in the memory: an image before
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
        if self.picture.format not in ("JPEG", "MPO"):  # whose head has it, and which can be shrunk until they are loaded
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
    """`box` (top, left, height, width), resampled to `size`; pixels outside `clip` (top, left, bottom, right) do not count."""

    size: Size
    box: tuple[float, float, float, float]
    clip: tuple[int, int, int, int]


class Crop(Protocol):
    """What chooses a window of an image: what a crop of one's own has, a value that can be pickled."""

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(height, width) of every result; None where it depends on the image."""

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The window of an image. Where it is smaller than `shape`, the result has black around it (`middle_of`).

        Args:
            height, width: of the image, in pixels.
            rng: the sample's generator.
        Returns:
            `Window(size, box, clip)`: the box (top, left, height, width) of the image is resampled to the size (height, width);
            pixels outside the clip (top, left, bottom, right) do not count.
        """


@dataclass(frozen=True)
class _SizedCrop:
    size: int | Sequence[int]

    def __post_init__(self) -> None:
        _pair(self.size, type(self).__name__)

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(height, width) of every result; None where it depends on the image."""
        return _pair(self.size, type(self).__name__)


@dataclass(frozen=True)
class RandomResizedCrop(_SizedCrop):
    """A random part of the image, of random area and aspect, resized: torchvision's definition and distribution.

    The part is cut out before it is resized, as there: what lies beside it leaves no trace.

    Args:
        size: of the result, (height, width) or one number for both.
        scale: share of the image's area, least and most.
        ratio: width over height, least and most; drawn evenly in its logarithm.
    Raises:
        ValueError: a number is outside its bounds.
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
        """The part of an image of this `height` and `width` that becomes the result, drawn from `rng`."""
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
    """The whole image, resized.

    Args:
        size: (height, width), whatever that does to the aspect; or the length of the shorter side, with the aspect kept, so that
            results differ in shape.
    Raises:
        ValueError: a number is outside its bounds.
    """

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(height, width) of every result; None where it depends on the image."""
        return (None, None) if isinstance(self.size, int) else super().shape

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The part of an image of this `height` and `width` that becomes the result, which is all of it; `rng` is not asked."""
        size = _shorter(self.size, height, width) if isinstance(self.size, int) else _pair(self.size, "Resize")
        return Whole().window(height, width, rng)._replace(size=size)


@dataclass(frozen=True)
class CenterCrop(_SizedCrop):
    """The middle of the image; black around one that is smaller, as torchvision pads it.

    Args:
        size: of the result, (height, width) or one number for both.
        resize: first resize the whole image so that its shorter side is this long: the usual 256 for a size of 224.
    Raises:
        ValueError: a number is outside its bounds.
    """

    resize: int | None = None

    def __post_init__(self) -> None:
        size = _pair(self.size, "CenterCrop")
        if self.resize is not None and self.resize < max(size):
            raise ValueError(f"CenterCrop: resize is the shorter side and needs to be at least size; got {self.resize} for {size}")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The part of an image of this `height` and `width` that becomes the result; `rng` is not asked."""
        size = _pair(self.size, "CenterCrop")
        resized = (height, width) if self.resize is None else _shorter(self.resize, height, width)
        size = min(size[0], resized[0]), min(size[1], resized[1])
        top, left = round((resized[0] - size[0]) / 2), round((resized[1] - size[1]) / 2)
        down, along = height / resized[0], width / resized[1]
        box = (top * down, left * along, size[0] * down, size[1] * along)
        return Window(size, box, (0, 0, height, width))


@dataclass(frozen=True)
class Whole:
    """The image as it is."""

    shape: tuple[None, None] = (None, None)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        return Window((height, width), (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


def middle_of(shape: Size, size: Size, *, is_flipped: bool) -> tuple[slice, slice]:
    """The rows and columns of a result of `shape` that a window of a smaller `size` fills.

    An odd pixel is one more below and at the right, or at the left of a mirror image, which is turned as a whole.
    """
    top, left = (shape[0] - size[0]) // 2, (shape[1] - size[1] + is_flipped) // 2
    return slice(top, top + size[0]), slice(left, left + size[1])


def _between(least: float, most: float, rng: np.random.Generator) -> float:
    """A number from [least, most). `rng.uniform` and `rng.integers` draw the same in twenty times the time."""
    return least + (most - least) * rng.random()


def _pair(size: int | Sequence[int], name: str) -> Size:
    """(height, width)."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name}: size needs one or two whole numbers of pixels, at least 1; got {size!r}")
    return sides[0], sides[1]


def _shorter(side: int, height: int, width: int) -> Size:
    """Height and width of an image whose shorter side becomes `side`, rounded down as torchvision does."""
    if width <= height:
        return int(side * height / width), side
    return side, int(side * width / height)


Shape = tuple[int | None, ...]
Place = Callable[[tuple[int, ...]], NDArray[Any]]  # shape -> where the image is to be written
MAX_PIXELS = 89_478_485  # of an image, as Pillow has it: 256 MiB decoded
_MARGIN = 2  # times the result that a shrunk image is: libjpeg's shrinking and the triangle then all but agree
_LEAST_SHRUNK = 16  # pixels of a side: below, the library's rounding would choose another reduction
_STRAIGHT: dict[int, Callable[[Pixels], Pixels]] = {  # how a stored image is turned, by EXIF orientation
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
    """What becomes of an encoded image: `decoder(data)` is its array. A value: it can be compared, pickled, shared by threads.

    Random parameters come from `sample_rng()`; outside a ShmLoader from Python's `random`, which torch's DataLoader seeds.

    Args:
        crop: RandomResizedCrop, CenterCrop, Resize or one's own; None: the image as it is.
        flip: probability of a mirror image, left to right.
        normalize: (mean, standard deviation), each three numbers on the scale from 0 to 1; makes float32.
        layout: "CHW", as torch's layers want it, or "HWC".
        dtype: "uint8", or "float32": from 0 to 1, or normalized. Default: float32 if normalized.
        decoder: "auto", "libjpeg" (Pillow's, which decodes only what the crop needs), "simplejpeg" or "pillow".
        scaled: let the JPEG decoder shrink large images to a half, a quarter or an eighth, as long as the crop stays twice as large
            as the result: mean deviation below 2 levels of 255. Without it, and for smaller images, no level is further than one
            from that of Pillow's BILINEAR.
        fast: decode with the fast DCT and chroma upsampling: a tenth quicker, mean deviation 1 to 2 levels.
        upright: turn images as their EXIF or XMP orientation says, whatever kind of file they are in, as Pillow's
            `ImageOps.exif_transpose` does; else they stay as stored, as torchvision leaves them.
        strict: None: read a file that breaks a rule of its format if Pillow reads it and its picture is whole (bytes between the
            segments of a JPEG, a PNG without its end), and count it in `stats()["num_irregular"]`; refuse JPEG files that are
            damaged or cut off, as far as the library can tell. True: refuse all of these. False: also read damaged JPEG files;
            the library invents the pixels that are missing. What lies below the crop, of a file with restart markers what lies
            beside it, is not read, so damage there goes unnoticed.
        max_pixels: of an image; a larger one is refused before any memory is taken.
    Raises:
        ValueError: an option is none of these; (by a call) a file is no sound image.
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
        """Type and shape of the result, as a schema has them: ("uint8", (3, 224, 224)). None: it depends on the image."""
        height, width = self._crop.shape
        shape = (3, height, width) if self.layout == "CHW" else (height, width, 3)
        return "uint8" if self._levels is None else "float32", shape

    def __call__(self, data: Encoded) -> NDArray[Any]:
        """Return the image of a file, in memory of its own: shape and dtype as `spec` says. `data` as of `decode`."""
        return self.decode(data, lambda shape: np.empty(shape, self.spec[0]))

    def decode(self, data: Encoded, place: Place) -> NDArray[Any]:
        """Writes the image of a file to where `place` says, which is asked once its shape is known and its header sound.

        Args:
            data: an encoded image: bytes, another buffer of them, or a dict that has them as "bytes", as Hugging Face's
                `datasets.Image` stores pictures.
            place: shape -> a writable array of that shape and of the dtype that `spec` says.
        Returns:
            what `place` gave.
        Raises:
            ValueError: the file is no sound image, or `data` is no file.
            ImportError: there is no library for it.
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
        if is_all and is_plain and middle.flags.c_contiguous:  # the library's pixels are the result
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
        """The part of a result that a window smaller than the crop fills; all of it becomes black."""
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
        """What each level of each channel becomes; None if they stay."""
        if self.normalize is None and self.dtype != "float32":
            return None
        mean, deviation = ((0,) * 3, (1,) * 3) if self.normalize is None else self.normalize
        if len(mean) != 3 or len(deviation) != 3 or not all(each > 0 for each in deviation):
            raise ValueError(f"normalize needs three means and three standard deviations above 0; got {self.normalize}")
        return levels_of(mean, deviation)


def levels_of(mean: Sequence[float], deviation: Sequence[float]) -> NDArray[np.float32]:
    """What each level of each channel becomes, normalized by torchvision's arithmetic: shape (channels, 256)."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    return (levels - np.array(mean, np.float32)[:, None]) / np.array(deviation, np.float32)[:, None]


def generator() -> np.random.Generator:
    """The sample's own generator; outside a ShmLoader one drawn from `random`."""
    try:
        return shmload.sample_rng()
    except RuntimeError:
        return np.random.default_rng(random.getrandbits(128))


def _shrunk(window: Window, reduction: int, whole: Size) -> Window:
    """The same window of an image shrunk to a `reduction`-th, of (height, width) `whole`."""
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
    """The pixels within its clip that resampling a window looks at: those of its box, and half a triangle around."""
    found = []
    for axis in (0, 1):
        start, length, low, high = window.box[axis], window.box[axis + 2], window.clip[axis], window.clip[axis + 2]
        radius = max(1.0, length / window.size[axis])
        found.append((max(low, math.floor(start - radius)), min(high, math.ceil(start + length + radius))))
    return found[0][0], found[1][0], found[0][1], found[1][1]
