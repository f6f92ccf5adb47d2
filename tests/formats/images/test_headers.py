from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload.formats.images.jpeg_header import jpeg_header, jpeg_is_whole
from shmload.formats.images.png_header import png_header
from tests.formats.images.jpegs import segment

SOI = b"\xff\xd8"


def frame(height: int = 5, width: int = 6, precision: int = 8) -> bytes:
    return segment(0xC0, struct.pack(">BHHB", precision, height, width, 3) + bytes(9))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 20, "optimize": True}, {"exif": b"Exif\0\0"}])
def test_header_equals_pillows(photo: Image.Image, encode: Callable[..., bytes], options: dict[str, Any]) -> None:
    data = encode(photo, **options)
    header = jpeg_header(data)
    assert (photo.height, photo.width, 3) == header[:3]
    assert data[header.scan_at : header.scan_at + 2] == b"\xff\xda"
    assert jpeg_is_whole(data, header)
    assert not jpeg_is_whole(data[:-2], header)
    assert jpeg_header(encode(photo.convert("L"))).num_components == 1


def test_padding_and_standalone_markers_are_skipped() -> None:
    data = SOI + b"\xff\xff\xff" + segment(0xE0, b"x")[1:] + b"\xff\x01" + frame() + segment(0xDA, b"")
    assert (5, 6, 3, len(data) - 4) == jpeg_header(data)[:4]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SOI + b"\xff", "ends at byte 3, before its image begins"),
        (SOI + segment(0xE0, b"xy") + b"zzzz", "byte 8 is 0x7a, where a marker has to begin"),
        (SOI + b"\xff\xe0\xff\xff", "the segment at byte 2 does not end within the 6 bytes of the file"),
        (SOI + b"\xff\xe0\x00\x01", "the segment at byte 2 does not end"),
        (SOI + b"\xff\xd9\x00\x02", "the segment at byte 2 does not end"),
        (SOI + segment(0xC0, b"\x08"), "the frame at byte 2 has 3 bytes, needs 8"),
        (SOI + frame(precision=12), "a JPEG of 12 bits per channel; only 8 can be decoded"),
        (SOI + frame(height=0), "a JPEG of 0 x 6 pixels, as the frame at byte 2 says"),
        (SOI + segment(0xDA, b""), "its scan at byte 2 has no frame before it"),
    ],
)
def test_error_for_a_damaged_jpeg_header_names_the_byte(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jpeg_header(data, is_strict=True)


@pytest.fixture(scope="module")
def png() -> bytes:
    import io

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (7, 9, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_png_header_is_read(png: bytes) -> None:
    assert png_header(png) == (7, 9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_png_is_detected(png: bytes, data: st.DataObject) -> None:
    damaged = bytearray(png)
    damaged[data.draw(st.integers(8, len(png) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="PNG"):
        png_header(bytes(damaged))


def test_truncated_png_is_detected(png: bytes) -> None:
    for end in range(8, len(png)):
        with pytest.raises(ValueError, match="PNG"):
            png_header(png[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda png: png[:40], "a PNG cut off: the chunk at byte 33 does not end within the 40 bytes of the file"),
        (lambda png: png[:60] + b"~" + png[61:], "the chunk at byte 33 does not match its checksum"),
        (lambda png: png[:12] + b"XXXX" + png[16:], "no header begins at byte 8"),
    ],
)
def test_error_for_a_damaged_png_names_the_byte(png: bytes, change: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        png_header(change(png))
