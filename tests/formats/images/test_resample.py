from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload._core.resample import resample
from shmload.formats.images.crops import Window
from shmload.formats.images.decoder import _needed


def resampled(image: np.ndarray[Any, Any], window: Window, **options: Any) -> np.ndarray[Any, Any]:
    planar, levels = options.get("is_planar", False), options.get("levels")
    shape = (3, *window.size) if planar else (*window.size, 3)
    out = np.full(shape, 7, np.uint8 if levels is None else np.float32)
    resample(image, out, *window, **options)
    return out


def whole(image: np.ndarray[Any, Any], size: tuple[int, int]) -> Window:
    height, width = image.shape[:2]
    return Window(size, (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


@st.composite
def images_and_windows(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Window]:
    height, width = draw(st.integers(1, 160)), draw(st.integers(1, 160))
    size = (draw(st.integers(1, 90)), draw(st.integers(1, 90)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    if draw(st.booleans()):
        image = (image > 127).astype(np.uint8) * 255  # the largest possible reduction
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    bottom, right = draw(st.integers(top + 1, height)), draw(st.integers(left + 1, width))
    shares = [draw(st.sampled_from((0.0, 0.1, 0.37))) for _ in range(4)]
    y, x = top + shares[0] * (bottom - top), left + shares[1] * (right - left)
    box = (y, x, (bottom - y) * (1 - shares[2]), (right - x) * (1 - shares[3]))
    return image, Window(size, box, (top, left, bottom, right))


@pytest.mark.slow(reason="hypothesis generates and resamples many images")
@settings(max_examples=200, deadline=None)
@given(images_and_windows())
def test_every_level_is_within_one_of_pillows(
    by_pillow: Callable[[Image.Image, Window], Any], case: tuple[np.ndarray[Any, Any], Window]
) -> None:
    image, window = case
    expected = by_pillow(Image.fromarray(image), window).astype(int)
    assert np.abs(expected - resampled(image, window)).max() <= 1


@settings(max_examples=35, deadline=None)
@given(images_and_windows(), st.booleans(), st.booleans())
def test_every_instruction_set_gives_the_same_bytes(
    case: tuple[np.ndarray[Any, Any], Window], is_planar: bool, is_flipped: bool
) -> None:
    image, window = case
    found = [resampled(image, window, is_planar=is_planar, is_flipped=is_flipped, vectors=v) for v in range(3)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@settings(max_examples=30, deadline=None)
@given(images_and_windows())
def test_layouts_flips_and_levels_show_the_same_pixels(case: tuple[np.ndarray[Any, Any], Window]) -> None:
    image, window = case
    plain = resampled(image, window)
    levels = np.random.default_rng(0).random((3, 256), np.float32)
    planes = plain.transpose(2, 0, 1)
    assert np.array_equal(planes, resampled(image, window, is_planar=True))
    assert np.array_equal(plain[:, ::-1], resampled(image, window, is_flipped=True))
    expected = np.stack([levels[c][planes[c]] for c in range(3)])
    assert np.array_equal(expected, resampled(image, window, is_planar=True, levels=levels))
    assert np.array_equal(expected.transpose(1, 2, 0)[:, ::-1], resampled(image, window, is_flipped=True, levels=levels))


def test_window_of_unchanged_size_is_copied(photo: Image.Image) -> None:
    image = np.asarray(photo)
    assert np.array_equal(image, resampled(image, whole(image, image.shape[:2])))


@pytest.mark.parametrize("level", [0, 1, 127, 254, 255])
def test_one_color_stays_that_color(level: int) -> None:
    image = np.full((301, 407, 3), level, np.uint8)
    for size in ((1, 1), (7, 400), (500, 3)):
        assert set(resampled(image, whole(image, size)).ravel().tolist()) == {level}


def test_reduction_by_thousands_is_the_mean() -> None:
    image = np.random.default_rng(3).integers(0, 256, (4, 20_000, 3), np.uint8)
    found = resampled(image, whole(image, (1, 2)))
    expected = np.asarray(Image.fromarray(image).resize((2, 1), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(found - expected).max() <= 1


def test_pixels_outside_the_clip_have_no_effect() -> None:
    image = np.random.default_rng(4).integers(0, 256, (40, 40, 3), np.uint8)
    window = Window((5, 5), (10.0, 12.0, 20.0, 18.0), (10, 12, 30, 30))
    before = resampled(image, window)
    image[:10] = image[30:] = image[:, :12] = image[:, 30:] = 0
    assert np.array_equal(before, resampled(image, window))


@settings(max_examples=40, deadline=None)
@given(images_and_windows())
def test_resampling_a_sufficient_part_equals_resampling_the_whole(case: tuple[np.ndarray[Any, Any], Window]) -> None:
    image, window = case
    expected = resampled(image, window)
    top, left, bottom, right = _needed(window)
    part = np.ascontiguousarray(image[top:bottom, left:right])
    assert np.array_equal(expected, resampled(part, window, origin=(top, left), whole=image.shape[:2]))


def test_part_that_lacks_pixels_is_an_error() -> None:
    image = np.zeros((10, 10, 3), np.uint8)
    window = Window((3, 3), (10.0, 10.0, 10.0, 9.0), (5, 5, 30, 30))
    message = r"box \(10.0, .* within clip \(5, 5, 30, 30\) needs more than the 10 x 10 pixels at \(10, 10\) that are there"
    with pytest.raises(ValueError, match=message):
        resampled(image, window, origin=(10, 10), whole=(40, 40))
    with pytest.raises(ValueError, match=r"10 x 10 pixels at \(31, 0\) are not inside the image of 40 x 40"):
        resampled(image, window, origin=(31, 0), whole=(40, 40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": (0, -1)}, r"10 x 10 pixels at \(0, -1\) are not inside the image of 10 x 10"),
        ({"size": (0, 3)}, "both sides of size must be 1 to"),
        ({"clip": (0, 0, 11, 10)}, r"clip \(0, 0, 11, 10\) is not inside the image of 10 x 10"),
        ({"clip": (5, 0, 5, 10)}, "is not inside the image"),
        ({"box": (0.0, 0.0, 10.1, 10.0)}, r"box .* is not inside clip"),
        ({"box": (0.0, float("nan"), 5.0, 5.0)}, "is not inside clip"),
        ({"box": (0.0, 0.0, 0.0, 5.0)}, "is not inside clip"),
        ({"out": np.empty(26, np.uint8)}, r"out must have 27 bytes for size \(3, 3\), got 26"),
        ({"image": np.empty((10, 10, 4), np.uint8)}, r"the image must have the shape \(height, width, 3\), got \(10, 10, 4\)"),
        ({"levels": np.empty((3, 255), np.float32)}, r"levels must have the shape \(3, 256\), got \(3, 255\)"),
    ],
)
def test_contradictory_arguments_are_errors(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "image": np.zeros((10, 10, 3), np.uint8),
        "out": np.empty(27, np.uint8),
        "size": (3, 3),
        "box": (0.0, 0.0, 10.0, 10.0),
        "clip": (0, 0, 10, 10),
    }
    with pytest.raises(ValueError, match=message):
        resample(**{**given, **change})


def test_random_windows_are_resampled_or_rejected(fuzz: ModuleType) -> None:
    rng = np.random.default_rng(1)
    found = [fuzz.resample_at_random(rng) for _ in range(150)]
    assert True in found
    assert False in found


def test_damaged_files_are_decoded_or_rejected(fuzz: ModuleType) -> None:
    found = [fuzz.decode(data, fuzz.DECODERS[n % 4]) for n, data in enumerate(islice(fuzz.mutations(1), 300))]
    assert True in found
    assert False in found


def test_parts_of_damaged_files_are_decoded_or_rejected(fuzz: ModuleType) -> None:
    rng = np.random.default_rng(2)
    found = [fuzz.decode_parts(data, rng) for data in islice(fuzz.mutations(2), 300)]
    assert True in found
    assert False in found


def test_unchanged_files_are_decoded(fuzz: ModuleType) -> None:
    assert all(fuzz.decode(data, decoder) for data in fuzz.corpus() for decoder in fuzz.DECODERS)
