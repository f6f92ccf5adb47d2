"""A decoded part of a JPEG equals the same part of the decoded whole bit for bit, or is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload._core.jpeg import bind, decode
from tests.formats.images.jpegs import SAMPLINGS, Box, encoded, part_of, parts

Encode = Callable[..., bytes]


pytestmark = pytest.mark.usefixtures("libjpeg")


def check_part(data: bytes, part: Box, reduction: int, **options: Any) -> None:
    top, left, bottom, right = part
    whole = part_of(data, None, reduction, **options)
    assert np.array_equal(whole[top:bottom, left:right], part_of(data, part, reduction, **options))


def check_any_part(data: st.DataObject, sampling: str, largest: int) -> None:
    file = encoded(
        data.draw(st.integers(1, largest)),
        data.draw(st.integers(1, largest)),
        sampling,
        data.draw(st.sampled_from((30, 85, 98))),
        is_progressive=data.draw(st.booleans()),
        restarts=data.draw(st.sampled_from((0, 0, 1, 5))),
    )
    reduction = data.draw(st.sampled_from((1, 1, 2, 4, 8)))
    for _ in range(3):
        check_part(file, data.draw(parts(file, reduction)), reduction, is_fast=data.draw(st.booleans()))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_part_equals_that_of_the_whole(sampling: str, data: st.DataObject) -> None:
    check_any_part(data, sampling, 70)


@pytest.mark.slow(reason="hypothesis encodes and decodes many images")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_part_of_a_larger_image_equals_that_of_the_whole(sampling: str, data: st.DataObject) -> None:
    check_any_part(data, sampling, 260)


@pytest.mark.slow(reason="decodes hundreds of parts of an image")
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_progressive", [False, True])
def test_every_column_and_every_row_equals_that_of_the_whole(sampling: str, is_progressive: bool, is_fast: bool) -> None:
    file = encoded(61, 67, sampling, 90, is_progressive=is_progressive)
    whole = part_of(file, is_fast=is_fast)
    for start in range(60):
        for extent in (1, 2, 7, 16, 40):
            row, column = min(61, start + extent), min(67, start + extent)
            assert np.array_equal(whole[start:row], part_of(file, (start, 0, row, 67), is_fast=is_fast))
            assert np.array_equal(whole[:, start:column], part_of(file, (0, start, 61, column), is_fast=is_fast))


@pytest.mark.parametrize("sampling", ["444", "420"])
@pytest.mark.parametrize("num_scans", [1, 2, 3, 5])
def test_part_of_a_smoothed_progressive_file_equals_that_of_the_whole(sampling: str, num_scans: int) -> None:
    file = encoded(120, 130, sampling, 60, is_progressive=True)
    cut = -1
    for _ in range(num_scans + 1):
        cut = file.index(b"\xff\xda", cut + 1)
    cut = file.rindex(b"\xff\xc4", 0, cut)  # including the Huffman table before the scan
    unfinished = file[:cut] + b"\xff\xd9"
    assert not np.array_equal(part_of(file), part_of(unfinished))
    rng = np.random.default_rng(num_scans)
    for _ in range(20):
        top, left = (int(n) for n in rng.integers(0, (110, 120)))
        bottom, right = int(rng.integers(top + 1, 121)), int(rng.integers(left + 1, 131))
        check_part(unfinished, (top, left, bottom, right), 1)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whole_image_equals_simplejpegs(sampling: str, is_fast: bool) -> None:
    file = encoded(93, 121, sampling, 90, is_progressive=False)
    expected = simplejpeg.decode_jpeg(file, "RGB", fastdct=is_fast, fastupsample=is_fast)
    assert np.array_equal(expected, part_of(file, is_fast=is_fast))


def test_part_needs_a_fraction_of_the_memory(encode: Encode, photo: Image.Image) -> None:
    memory = np.empty(40 * (40 + 2 * 16 + 15) * 3, np.uint8)  # one MCU on each side, and the alignment of the first column
    first, end, _ = decode(encode(photo), memory, (90, 120), (30, 50, 70, 90))
    assert (first, end) == (32, 106)


def test_damage_above_or_within_a_part_is_an_error_and_damage_below_is_ignored(encode: Encode, photo: Image.Image) -> None:
    data = bytearray(encode(photo))
    middle = len(data) // 2
    data[middle : middle + 2] = b"\xff\xd3"  # a restart marker where none is allowed
    damaged = bytes(data)
    for part in ((0, 0, 90, 120), (80, 0, 90, 120), (89, 0, 90, 1)):
        with pytest.raises(ValueError, match="Corrupt JPEG data"):
            part_of(damaged, part)
        assert part_of(damaged, part, is_strict=False).size
    assert np.array_equal(part_of(encode(photo))[:16], part_of(damaged, (0, 0, 16, 120)))


def test_data_after_the_last_row_is_checked_with_the_last_row(encode: Encode, photo: Image.Image) -> None:
    data = encode(photo)
    assert data.endswith(b"\xff\xd9")
    for part in ((0, 0, 90, 120), (89, 0, 90, 3)):
        with pytest.raises(ValueError, match="Premature end of JPEG file"):
            part_of(data[:-2], part)


def without_segments(data: bytes, marker: bytes) -> bytes:
    while (at := data.find(marker)) >= 0:
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4]) :]
    return data


def test_file_without_tables_does_not_use_those_of_the_previous_file(encode: Encode, photo: Image.Image) -> None:
    data = encode(photo)
    part_of(encode(photo, quality=30, optimize=True))  # its own tables
    with pytest.raises(ValueError, match=r"Quantization table 0x00 was not defined"):
        part_of(without_segments(data, b"\xff\xdb"))
    standard = without_segments(data, b"\xff\xc4")  # libjpeg-turbo then uses the standard tables, which Pillow wrote with
    assert np.array_equal(part_of(data), part_of(standard))


def test_file_with_too_many_scans_is_an_error(encode: Encode, photo: Image.Image) -> None:
    data = encode(photo.crop((0, 0, 8, 8)), progressive=True)
    at = data.rindex(b"\xff\xda")
    bomb = data[:-2] + data[at:-2] * 501 + b"\xff\xd9"
    with pytest.raises(ValueError, match="a JPEG of more than 500 scans"):
        part_of(bomb, is_strict=False)
    assert part_of(data[:-2] + data[at:-2] * 400 + b"\xff\xd9", is_strict=False).shape == (8, 8, 3)


def test_size_that_differs_from_the_header_is_an_error(encode: Encode, photo: Image.Image) -> None:
    memory = np.empty(100_000, np.uint8)
    with pytest.raises(ValueError, match="a JPEG that decodes to another size than its header says"):
        decode(encode(photo), memory, (90, 119), (0, 0, 9, 9))


def test_more_than_8_bits_are_an_error(encode: Encode, photo: Image.Image) -> None:
    data = bytearray(encode(photo))
    data[data.index(b"\xff\xc0") + 4] = 12
    with pytest.raises(ValueError, match=r"a JPEG of other than 8 bits a channel|Unsupported JPEG data precision 12"):
        decode(bytes(data), np.empty(90 * 120 * 3, np.uint8), (90, 120), (0, 0, 90, 120))


@pytest.mark.parametrize("part", [(0, 0, 0, 5), (5, 0, 5, 5), (0, 7, 5, 7), (0, 0, 91, 5), (0, 0, 5, 121)])
def test_invalid_part_is_an_error(encode: Encode, photo: Image.Image, part: Box) -> None:
    memory = np.empty(90 * 120 * 3, np.uint8)
    with pytest.raises(ValueError, match=r"part \(.*\) is not inside the image of 90 x 120 pixels"):
        decode(encode(photo), memory, (90, 120), part)


def test_unsupported_reduction_is_an_error(encode: Encode, photo: Image.Image) -> None:
    with pytest.raises(ValueError, match="reduction must be 1, 2, 4 or 8, got 3"):
        decode(encode(photo), np.empty(9, np.uint8), (30, 40), (0, 0, 1, 1), reduction=3)


def test_too_little_memory_is_an_error(encode: Encode, photo: Image.Image) -> None:
    for nbytes in (0, 90 * 120 * 3 - 1):
        with pytest.raises(ValueError, match="no room for the decoded part of a JPEG"):
            decode(encode(photo), np.empty(nbytes, np.uint8), (90, 120), (0, 0, 90, 120))


def test_decoding_before_a_library_is_bound_is_an_error() -> None:
    program = "from shmload._core.jpeg import decode\ndecode(b'', memoryview(bytearray(3)), (1, 1), (0, 0, 1, 1))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "RuntimeError: libjpeg-turbo is not loaded: call bind() first" in done.stderr


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (b"/nowhere/libjpeg.so", "cannot load libjpeg-turbo from /nowhere/libjpeg.so: /nowhere/libjpeg.so: cannot open"),
        (b"libm.so.6", "cannot load libjpeg-turbo from libm.so.6: jpeg_std_error is not in it"),
    ],
)
def test_binding_another_shared_object_is_an_error_and_keeps_the_bound_library(
    encode: Encode, photo: Image.Image, path: bytes, message: str
) -> None:
    with pytest.raises(ImportError, match=message):
        bind(path)
    assert part_of(encode(photo)).shape == (90, 120, 3)


OTHER_ABI = """
#include <stdio.h>
#include <stddef.h>
struct err { void (*exit)(void *), (*emit)(void *, int), (*out)(void *), (*format)(void *, char *); char rest[200]; };
struct cinfo { struct err *err; };
static void format(void *cinfo, char *buffer) { sprintf(buffer, "Wrong JPEG library version: library is 80, caller expects 62"); }
void *jpeg_std_error(struct err *err) { err->format = format; return err; }
void jpeg_CreateDecompress(struct cinfo *cinfo, int version, size_t nbytes) { if (version != 80) cinfo->err->exit(cinfo); }
void jpeg_mem_src(void) {} void jpeg_read_header(void) {} void jpeg_start_decompress(void) {} void jpeg_crop_scanline(void) {}
void jpeg_skip_scanlines(void) {} void jpeg_read_scanlines(void) {} void jpeg_finish_decompress(void) {}
void jpeg_destroy_decompress(void *cinfo) {} void jpeg_read_coefficients(void) {} void jpeg_copy_critical_parameters(void) {}
void jpeg_CreateCompress(void) {} void jpeg_write_coefficients(void) {} void jpeg_finish_compress(void) {}
void jpeg_destroy_compress(void) {}
"""


@pytest.mark.slow(reason="gcc compiles a library")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_library_with_another_interface_is_an_error(tmp_path: Path) -> None:
    source, made = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(OTHER_ABI)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source], check=True, timeout=120)
    with pytest.raises(ImportError, match=r"libother.so: Wrong JPEG library version: library is 80, caller expects 62"):
        bind(bytes(made))
