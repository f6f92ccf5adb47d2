"""Crops of JPEGs with restart markers read only their own intervals, and give the same pixels, also from damaged files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload._core.jpeg import recode
from shmload.formats import (
    CenterCrop,
    ImageDecoder,
    ImageFolder,
    RandomResizedCrop,
    TarDataset,
    TarWriter,
    TFRecordDataset,
    TFRecordWriter,
    with_restart_markers,
)
from tests.formats.images.damaged import WIDTHS, damage, file_with_markers, read_damaged
from tests.formats.images.jpegs import SAMPLINGS, encoded, interval, intervals, part_of, parts, sequential

Encode = Callable[..., bytes]


pytestmark = pytest.mark.usefixtures("libjpeg")


def check_any_part(data: st.DataObject, sampling: str, largest: int) -> None:
    file = encoded(
        data.draw(st.integers(1, largest)),
        data.draw(st.integers(1, largest)),
        sampling,
        data.draw(st.sampled_from((30, 85, 98))),
        is_progressive=data.draw(st.booleans()),
        of=data.draw(st.sampled_from(("photo", "noise"))),
    )
    reencoded = recode(file, least_width=data.draw(st.sampled_from(WIDTHS)))
    reduction, options = data.draw(st.sampled_from((1, 1, 2, 4, 8))), {"is_fast": data.draw(st.booleans())}
    whole = part_of(file, None, reduction, **options)
    for _ in range(4):
        top, left, bottom, right = part = data.draw(parts(file, reduction))
        assert np.array_equal(whole[top:bottom, left:right], part_of(reencoded, part, reduction, **options))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_part_equals_that_of_the_file_without_markers(sampling: str, data: st.DataObject) -> None:
    check_any_part(data, sampling, 90)


@pytest.mark.slow(reason="hypothesis encodes and decodes many images")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_part_of_a_larger_image_equals_that_of_the_file_without_markers(sampling: str, data: st.DataObject) -> None:
    check_any_part(data, sampling, 300)


@pytest.mark.slow(reason="decodes hundreds of parts of an image")
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_column_and_every_row_equals_that_of_the_file_without_markers(sampling: str, is_fast: bool) -> None:
    file = encoded(61, 131, sampling, 90)
    whole = part_of(file, is_fast=is_fast)
    for least_width in (0, 8, 32):
        reencoded = recode(file, least_width=least_width)
        for start in range(0, 131, 3):
            for extent in (1, 2, 7, 16, 40):
                row, column = min(61, start % 61 + extent), min(131, start + extent)
                part = (start % 61, start, row, column)
                assert np.array_equal(whole[part[0] : row, start:column], part_of(reencoded, part, is_fast=is_fast))


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_intervals_of_several_rows(photo: Image.Image, encode: Encode, rows: int) -> None:
    file, plain = encode(photo, subsampling=2, restart_marker_rows=rows), encode(photo, subsampling=2)
    assert interval(file) == 8 * rows
    whole = part_of(plain)
    for top in range(0, 90, 7):
        assert np.array_equal(whole[top : top + 5, 20:50], part_of(file, (top, 20, min(90, top + 5), 50)))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 7, 8, 11, 16, 47, 48, 49, 5000])
def test_intervals_that_end_anywhere_in_a_row(photo: Image.Image, encode: Encode, num_blocks: int) -> None:
    whole = part_of(encode(photo, subsampling=2))
    for options in ({}, {"progressive": True}):
        file = encode(photo, subsampling=2, restart_marker_blocks=num_blocks, **options)
        for part in ((40, 60, 60, 80), (89, 119, 90, 120), (0, 0, 1, 1), (17, 0, 90, 33)):
            top, left, bottom, right = part
            assert np.array_equal(whole[top:bottom, left:right], part_of(file, part))


@pytest.mark.parametrize(
    ("sampling", "is_fast", "margin"), [("444", False, 0), ("420", False, 1), ("420", True, 0), ("L", False, 0)]
)
def test_intervals_outside_of_a_crop_are_not_read(sampling: str, is_fast: bool, margin: int) -> None:
    """Damage everything else. Intervals are 16 pixels wide, and a crop needs those around it only where upsampling mixes them."""
    side = 16 if sampling == "420" else 8
    file = recode(encoded(12 * side, 12 * side, sampling, 90), least_width=2 * side)
    assert interval(file) == 2
    damaged = bytearray(file)
    for number, (begin, end) in enumerate(intervals(file)):
        row, column = divmod(number, 6)
        if not (5 - margin <= row <= 6 + margin and 2 - (margin > 0) <= column <= 3 + (margin > 0)):
            damaged[begin:end] = b"\x55" * (end - begin)
    part = (5 * side, 4 * side, 7 * side, 8 * side)
    expected = part_of(file, part, is_fast=is_fast)
    assert np.array_equal(expected, part_of(bytes(damaged), part, is_fast=is_fast))
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        part_of(bytes(damaged), None, is_fast=is_fast)
    nearer = list(intervals(file))[5 * 6 + 2]
    damaged[slice(*nearer)] = b"\x55" * (nearer[1] - nearer[0])
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        part_of(bytes(damaged), part, is_fast=is_fast)


def with_markers_changed(data: bytes, kind: str) -> bytes:
    """Returns the file with its fifth marker damaged; the part that the test reads is below it."""
    at = list(intervals(data))[4][1]
    assert data[at : at + 2] == b"\xff\xd4"
    return {
        "missing": data[:at] + data[at + 2 :],
        "out of order": data[:at] + b"\xff\xd6" + data[at + 2 :],
        "doubled": data[:at] + data[at : at + 2] + data[at:],
        "one too many": data[:at] + b"\xff\xd4\x12\x34" + data[at:],
        "padded": data[:at] + b"\xff\xff" + data[at:],
        "another": data[:at] + b"\xff\xc4" + data[at + 2 :],
        "the end": data[:at] + b"\xff\xd9" + data[at + 2 :],
        "no further markers": data[:at] + b"\xff\xd9",
        "cut off": data[: at + 1],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["missing", "out of order", "doubled", "one too many", "padded", "another", "the end", "no further markers", "cut off"]
)
def test_file_with_irregular_markers_is_read_sequentially(kind: str) -> None:
    file = recode(encoded(96, 160, "420", 90), least_width=48)
    damaged, part = with_markers_changed(file, kind), (60, 70, 80, 90)
    assert np.array_equal(sequential(damaged, part, 1, is_strict=False), part_of(damaged, part, is_strict=False))
    if kind == "padded":  # the format allows it
        assert np.array_equal(part_of(file, part), part_of(damaged, part))
        return
    with pytest.raises(ValueError, match=r"Corrupt JPEG data|Premature end of JPEG file"):
        part_of(damaged, part)


def read_many_damaged(seed: int, num_files: int) -> set[str]:
    """Returns the set of outcomes."""
    rng = random.Random(seed)
    files = (file_with_markers(rng) for _ in range(num_files))
    return {read_damaged(damage(file, rng), rng) for file in files for _ in range(8)}


def test_damaged_file_is_an_error_or_equals_a_sequential_read() -> None:
    assert {"refused", "passed", "read", "unread"} == read_many_damaged(1, 40)


@pytest.mark.slow(reason="damages and decodes 250 files")
@pytest.mark.parametrize("seed", range(4))
def test_many_damaged_files_are_errors_or_equal_a_sequential_read(seed: int) -> None:
    assert {"refused", "passed", "read", "unread"} == read_many_damaged(seed + 2, 250)


@pytest.mark.parametrize("crop", [RandomResizedCrop(33), CenterCrop(20, resize=30), RandomResizedCrop(7), None])
@pytest.mark.parametrize("options", [{}, {"fast": True}, {"upright": True, "layout": "HWC"}, {"scaled": False}])
def test_decoder_gives_the_same_image_of_a_reencoded_file(
    photos: list[Path], encode: Encode, crop: Any, options: dict[str, Any]
) -> None:
    turned = Image.Exif()
    turned[0x0112] = 8
    with Image.open(photos[1]) as photo:
        files = [photos[2].read_bytes(), encode(photo, exif=turned, progressive=True)]
    for data in files:
        found = []
        for each in (data, with_restart_markers(data), with_restart_markers(data, every="row")):
            random.seed(7)
            found.append(ImageDecoder(crop, flip=0.5, **options)(each))
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])


def test_every_dataset_of_images_reads_files_with_restart_markers(photos: list[Path], tmp_path: Path) -> None:
    decoder, schema = ImageDecoder(CenterCrop(64)), {"image": ("uint8", (3, 64, 64))}
    files = [path.read_bytes() for path in photos[:3]]
    expected = [decoder(file) for file in files]
    reencoded = [with_restart_markers(file) for file in files]
    with TarWriter(tmp_path / "photos.tar") as tar, TFRecordWriter(tmp_path / "photos.tfrecord") as records:
        for number, file in enumerate(reencoded):
            (tmp_path / f"{number}.jpg").write_bytes(file)
            tar.write({"__key__": str(number), "image.jpg": file})
            records.write({"image": file})
    folder = ImageFolder([tmp_path / f"{number}.jpg" for number in range(3)], decoder)
    shard = TarDataset(tmp_path / "photos.tar", decode={"image.jpg": decoder})
    stored = TFRecordDataset(tmp_path / "photos.tfrecord", schema, decode={"image": decoder})
    for number in range(3):
        assert np.array_equal(expected[number], folder[number]["image"])
        assert np.array_equal(expected[number], shard[number]["image.jpg"])
        assert np.array_equal(expected[number], stored[number]["image"])
