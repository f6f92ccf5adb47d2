"""A JPEG reencoded with restart markers is the same picture, with the same warnings, in every decoder; or it stays unchanged."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload.formats import with_restart_markers
from shmload.formats.images.jpeg_header import jpeg_header
from shmload.formats.images.restart_markers import recoded
from tests.formats.images.jpegs import SAMPLINGS, dropped_scan, encoded, interval, markers

Encode = Callable[..., bytes]
Every = Literal["tile", "row"]
EVERY: tuple[Every, ...] = ("tile", "row")


pytestmark = pytest.mark.usefixtures("libjpeg")


def by_pillow(data: bytes, **draft: Any) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(data)) as opened:
        if draft:
            opened.draft(**draft)
        return np.asarray(opened)


def check_same_picture(data: bytes, reencoded: bytes) -> None:
    """Compares the results of libjpeg-turbo's three ways through Pillow, simplejpeg's own copy, and OpenCV's."""
    header = jpeg_header(data)
    assert header[:3] == jpeg_header(reencoded)[:3]
    assert np.array_equal(by_pillow(data), by_pillow(reencoded))
    quarter = {"mode": None, "size": (header.width // 4 or 1, header.height // 4 or 1)}
    assert np.array_equal(by_pillow(data, **quarter), by_pillow(reencoded, **quarter))
    for is_fast in (False, True):
        found = [simplejpeg.decode_jpeg(each, "RGB", fastdct=is_fast, fastupsample=is_fast) for each in (data, reencoded)]
        assert np.array_equal(*found)
    found = [cv2.imdecode(np.frombuffer(each, np.uint8), cv2.IMREAD_COLOR) for each in (data, reencoded)]
    assert np.array_equal(*found)


def check_any_file(data: st.DataObject, sampling: str, largest: int) -> None:
    file = encoded(
        data.draw(st.integers(1, largest)),
        data.draw(st.integers(1, largest)),
        sampling,
        data.draw(st.sampled_from((1, 30, 85, 100))),
        is_progressive=data.draw(st.booleans()),
        restarts=data.draw(st.sampled_from((0, 0, 1, 5))),
        of=data.draw(st.sampled_from(("photo", "noise"))),
    )
    for every in EVERY:
        reencoded, why_not = recoded(file, every=every)
        assert not why_not
        check_same_picture(file, reencoded)
        assert reencoded == with_restart_markers(reencoded, every=every)
        assert reencoded == with_restart_markers(with_restart_markers(file, every="row"), every=every)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_file_stays_the_same_picture_and_reencoding_is_deterministic(sampling: str, data: st.DataObject) -> None:
    check_any_file(data, sampling, 70)


@pytest.mark.slow(reason="hypothesis encodes and reencodes many images")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_larger_file_stays_the_same_picture_and_reencoding_is_deterministic(sampling: str, data: st.DataObject) -> None:
    check_any_file(data, sampling, 300)


@pytest.mark.parametrize("every", EVERY)
def test_photographs_stay_the_same_and_hardly_grow(photos: list[Path], every: Every) -> None:
    before, after = 0, 0
    for path in photos:
        data = path.read_bytes()
        reencoded = with_restart_markers(data, every=every)
        assert np.array_equal(by_pillow(data), by_pillow(reencoded))
        before, after = before + len(data), after + len(reencoded)
    assert 0.95 < after / before < 0.99


@pytest.mark.parametrize("is_progressive", [False, True])
@pytest.mark.parametrize(
    ("sampling", "width", "tile"),
    # an interval is the smallest divisor of a row's MCUs with at least 48 pixels
    [("444", 120, 15), ("444", 384, 6), ("420", 384, 3), ("420", 500, 4), ("420", 176, 11), ("L", 384, 6), ("420", 9, 1)],
)
def test_markers_have_the_requested_positions(sampling: str, width: int, tile: int, is_progressive: bool) -> None:
    data = encoded(40, width, sampling, 80, is_progressive=is_progressive)
    side = 16 if sampling == "420" else 8
    per_row, num_rows = -(-width // side), -(-40 // side)
    for every, expected in (("tile", tile), ("row", per_row)):
        reencoded = with_restart_markers(data, every=every)  # type: ignore[arg-type]  # of a tuple
        assert expected == interval(reencoded)
        assert num_rows * per_row // expected - 1 == sum(0xD0 <= marker <= 0xD7 for marker in markers(reencoded))
        frames = {0xC0, 0xC1, 0xC2} & set(markers(reencoded))
        assert frames == {0xC0}  # every decoder reads it
        assert markers(reencoded).count(0xDA) == 1


def test_metadata_is_kept_byte_for_byte(photo: Image.Image, encode: Encode) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    data = encode(photo, progressive=True, exif=turned, icc_profile=bytes(range(256)) * 500, comment=b"a harbour", dpi=(300, 200))
    behind = b"\xff\xe9\x00\x05own" + b"what a telephone puts behind the end" * 9
    inner = data.rindex(b"\xff\xda")  # a segment between two scans
    data = data[:inner] + b"\xff\xfe\x00\x09between" + data[inner:] + behind
    reencoded = with_restart_markers(data)
    assert reencoded != data
    before, after = ([each for each in segments(file) if 0xE0 <= each[1] <= 0xEF or each[1] == 0xFE] for file in (data, reencoded))
    assert before == after
    assert b"between" in before[-1]
    assert reencoded.endswith(b"\xff\xd9" + behind)
    with Image.open(io.BytesIO(reencoded)) as opened:
        assert opened.getexif()[0x0112] == 6
        assert opened.info["icc_profile"] == bytes(range(256)) * 500
        assert opened.info["dpi"] == (300, 200)


def segments(data: bytes) -> list[bytes]:
    """Returns every segment that has a length, also those between scans."""
    found, at = [], 2
    while data[at : at + 2] != b"\xff\xd9":
        if data[at] != 0xFF or data[at + 1] < 0xC0 or 0xD0 <= data[at + 1] <= 0xD7:
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        found.append(data[at:end])
        at = end
    return found


@pytest.mark.parametrize("options", [{"keep_rgb": True}, {"keep_rgb": True, "progressive": True}])
def test_rgb_channels_stay_rgb(photo: Image.Image, encode: Encode, options: dict[str, Any]) -> None:
    data = encode(photo, quality=95, **options)
    reencoded = with_restart_markers(data)
    assert reencoded != data
    check_same_picture(data, reencoded)


def without(data: bytes, marker: int) -> bytes:
    for each in segments(data):
        if each[1] == marker:
            data = data.replace(each, b"")
    return data


def test_file_without_color_information_gets_none(photo: Image.Image, encode: Encode) -> None:
    data = without(encode(photo), 0xE0)
    reencoded = with_restart_markers(data)
    assert reencoded != data
    assert 0xE0 not in markers(reencoded)
    check_same_picture(data, reencoded)


def patched(data: bytes, frame: int | None = None, at: int = 0, to: bytes = b"") -> bytes:
    """Returns the file with another frame marker, or other bytes in its frame."""
    found = next(n for n in range(len(data)) if data[n] == 0xFF and data[n + 1] in (0xC0, 0xC2))
    changed = bytearray(data)
    if frame is not None:
        changed[found + 1] = frame
    changed[found + at : found + at + len(to)] = to
    return bytes(changed)


def test_file_that_cannot_be_reencoded_losslessly_is_unchanged_and_the_cause_is_returned(
    photo: Image.Image, encode: Encode
) -> None:
    data, progressive = encode(photo), encode(photo, progressive=True)
    middle = len(data) // 2
    cases = [
        (b"", "no JPEG"),
        (encode(photo, "PNG"), "no JPEG"),
        (data[:-2], "Premature end of JPEG file"),
        (data[:middle], "Premature end of JPEG file"),
        (data[:30], "a damaged JPEG: the segment at byte 20 does not end within the 30 bytes of the file"),
        (data[:middle] + b"\xff\xd3" + data[middle:], "Corrupt JPEG data: "),
        (encode(photo.convert("CMYK")), "neither grey nor of three channels"),
        (patched(data, frame=0xC9), "arithmetic coding"),
        (patched(data, at=4, to=b"\x0c"), "a JPEG of 12 bits per channel; only 8 can be decoded"),
        (patched(data, frame=0xC3), ""),
        (patched(data, at=5, to=b"\xff\xff\xff\xff"), "65535 x 65535 pixels, more than 89478485"),
        (dropped_scan(progressive), "a progressive file without all of its scans, which decoders smooth"),
    ]
    for file, why_not in cases:
        kept, found = recoded(file)
        assert file == kept == with_restart_markers(file)
        assert found.startswith(why_not)
        assert found


def test_unknown_positions_of_markers_are_an_error(photo: Image.Image, encode: Encode) -> None:
    with pytest.raises(ValueError, match=r"every needs to be one of \('tile', 'row'\); got 'mcu'"):
        with_restart_markers(encode(photo), every="mcu")  # type: ignore[arg-type]  # on purpose


def test_reencoding_without_libjpeg_is_an_import_error(
    photo: Image.Image, encode: Encode, without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import _imaging

    data = encode(photo)
    monkeypatch.setattr(_imaging, "libjpeg_turbo_version", None)
    without()
    with pytest.raises(ImportError, match=r"restart markers: Pillow with libjpeg-turbo 2.1 .*shmload\[images\]"):
        with_restart_markers(data)


def test_reencoding_before_a_library_is_bound_is_an_error() -> None:
    program = "from shmload._core.jpeg import recode\nrecode(b'')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "RuntimeError: libjpeg-turbo is not loaded: call bind() first" in done.stderr


def test_threads_reencode_to_the_same_bytes(photos: list[Path]) -> None:
    files = [path.read_bytes() for path in photos[:4]]
    expected = [with_restart_markers(file) for file in files]
    with ThreadPoolExecutor(3) as pool:
        assert expected * 3 == list(pool.map(with_restart_markers, files * 3))


def test_result_many_times_larger_than_the_file_is_written(encode: Encode) -> None:
    """Uses an image of one color: almost no bytes in a progressive file, and some bits per block in a sequential one."""
    data = encode(Image.new("RGB", (1600, 1600), (90, 120, 30)), progressive=True)
    reencoded = with_restart_markers(data)
    assert len(reencoded) > 1.25 * len(data) + 4096  # the initial size of the output buffer
    assert np.array_equal(by_pillow(data), by_pillow(reencoded))


def test_damaged_files_are_reencoded_as_they_are_decoded_or_left_unchanged(fuzz: ModuleType) -> None:
    found = [fuzz.recode(data) for data in islice(fuzz.mutations(3), 200)]
    assert True in found
    assert False in found


def test_file_of_several_pictures_stays_unchanged() -> None:
    file = io.BytesIO()
    pictures = [Image.fromarray(np.random.default_rng(seed).integers(0, 255, (200, 300, 3), np.uint8)) for seed in range(2)]
    pictures[0].save(file, "MPO", save_all=True, append_images=pictures[1:])
    data, why = recoded(file.getvalue())
    assert data == file.getvalue()
    assert why == "several pictures in one file (MPF), whose offsets would change"
