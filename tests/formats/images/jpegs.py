"""Makes all kinds of JPEG files, and finds their markers and intervals."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simplejpeg
from hypothesis import strategies as st
from PIL import Image, ImageFile

import shmload
from shmload._core.jpeg import decode
from shmload.formats.images.jpeg_header import jpeg_header

Box = tuple[int, int, int, int]
GUARD_BYTES = 64  # guard bytes after the memory that a call may write
SAMPLINGS = ("444", "422", "420", "440", "411", "L")
PHOTO = np.asarray(Image.open(Path(shmload.__file__).parent / "data" / "coffee.jpg").convert("RGB"))


def noise(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), np.uint8)


def encoded(
    height: int,
    width: int,
    sampling: str,
    quality: int,
    *,
    is_progressive: bool = False,
    restarts: int = 0,
    of: Literal["photo", "noise"] = "photo",
) -> bytes:
    """Encodes a piece of a photograph, or noise. `restarts` is the number of MCUs between markers."""
    photo = noise(height, width) if of == "noise" else np.ascontiguousarray(PHOTO[:height, :width])
    if sampling in ("440", "411"):  # Pillow cannot write these
        return simplejpeg.encode_jpeg(photo, quality, "RGB", sampling)  # type: ignore[no-any-return]  # has no types
    options: dict[str, Any] = {"quality": quality, "progressive": is_progressive, "restart_marker_blocks": restarts}
    picture = Image.fromarray(photo)
    if sampling == "L":
        picture = picture.convert("L")
    else:
        options["subsampling"] = {"444": "4:4:4", "422": "4:2:2", "420": "4:2:0"}[sampling]
    file, room = io.BytesIO(), ImageFile.MAXBLOCK
    ImageFile.MAXBLOCK = max(room, 4 * photo.nbytes + 4096)  # a progressive file must fit into Pillow's buffer
    try:
        picture.save(file, "JPEG", **options)
    finally:
        ImageFile.MAXBLOCK = room
    return file.getvalue()


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(payload) + 2).to_bytes(2) + payload


def after_app0(jpeg: bytes, *added: bytes) -> bytes:
    end = 4 + int.from_bytes(jpeg[4:6])
    return jpeg[:end] + b"".join(added) + jpeg[end:]


def markers(data: bytes) -> list[int]:
    """Returns every marker of the image, in order."""
    found, at = [], 2
    while (at := data.find(b"\xff", at)) >= 0:
        marker = data[at + 1]
        at += 2
        if marker in (0x00, 0xFF):
            continue
        found.append(marker)
        if marker == 0xD9:
            break
        if not 0xD0 <= marker <= 0xD7:
            at += int.from_bytes(data[at : at + 2])
    return found


def interval(data: bytes) -> int:
    """Returns the number of MCUs between restart markers, from the file's DRI segment."""
    at = data.index(b"\xff\xdd\x00\x04")
    return int.from_bytes(data[at + 4 : at + 6])


def dropped_scan(progressive: bytes) -> bytes:
    """Returns the file without its last scan and the Huffman table before that scan."""
    last = progressive.rindex(b"\xff\xda")
    return progressive[: progressive.rindex(b"\xff\xc4", 0, last)] + b"\xff\xd9"


def intervals(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields the first byte and the end of each restart interval, without its marker."""
    at = jpeg_header(data).scan_at + 2
    begin = at = at + int.from_bytes(data[at : at + 2])
    while (at := data.find(b"\xff", at)) >= 0:
        if data[at + 1]:
            yield begin, at
            begin = at + 2
        at += 2


def shrunk(data: bytes, reduction: int) -> tuple[int, int]:
    header = jpeg_header(data)
    return -(-header.height // reduction), -(-header.width // reduction)


def part_of(data: bytes, part: Box | None = None, reduction: int = 1, **options: Any) -> np.ndarray[Any, Any]:
    """Decodes a part, and check that nothing after its memory was written."""
    size = shrunk(data, reduction)
    top, left, bottom, right = part = part or (0, 0, *size)
    memory = np.full((bottom - top) * size[1] * 3 + GUARD_BYTES, 77, np.uint8)
    first, end, _ = decode(data, memory[:-GUARD_BYTES], size, part, reduction=reduction, **options)
    used = (bottom - top) * (end - first) * 3
    assert first <= left
    assert right <= end
    assert (memory[used:] == 77).all()
    return memory[:used].reshape(bottom - top, end - first, 3)[:, left - first : right - first]


def sequential(data: bytes, part: Box, reduction: int, **options: Any) -> np.ndarray[Any, Any]:
    """Decodes the same part by reading all rows above it, as in files without markers."""
    top, left, bottom, right = part
    return part_of(data, (0, 0, bottom, shrunk(data, reduction)[1]), reduction, **options)[top:, left:right]


@st.composite
def parts(draw: st.DrawFn, data: bytes, reduction: int) -> Box:
    """Draws a box of the picture decoded at 1 / reduction, often of a single pixel."""
    height, width = shrunk(data, reduction)
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    bottom, right = draw(st.integers(top + 1, height)), draw(st.integers(left + 1, width))
    return draw(st.sampled_from(((top, left, bottom, right), (top, left, top + 1, left + 1))))
