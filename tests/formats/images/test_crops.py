from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from shmload.formats import CenterCrop, ImageDecoder, RandomResizedCrop, Resize
from shmload.formats.images.crops import Whole, Window

SIDES = st.integers(1, 3000)
RNG = np.random.default_rng(0)


def torchvisions_box(height: int, width: int, scale: Any, ratio: Any, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params of torchvision 0.28, with numpy's random numbers in place of torch's."""
    area = height * width
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        target_area = area * rng.uniform(scale[0], scale[1])
        aspect_ratio = math.exp(rng.uniform(log_ratio[0], log_ratio[1]))
        w = int(round(math.sqrt(target_area * aspect_ratio)))  # noqa: RUF046  # as in torchvision
        h = int(round(math.sqrt(target_area / aspect_ratio)))  # noqa: RUF046
        if 0 < w <= width and 0 < h <= height:
            i = int(rng.uniform(0, height - h + 1))
            j = int(rng.uniform(0, width - w + 1))
            return i, j, h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w = width
        h = int(round(w / min(ratio)))  # noqa: RUF046
    elif in_ratio > max(ratio):
        h = height
        w = int(round(h * max(ratio)))  # noqa: RUF046
    else:
        w = width
        h = height
    return (height - h) // 2, (width - w) // 2, h, w


@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, st.integers(0, 1000), st.sampled_from([((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (2.0, 2.1))]))
def test_random_crop_equals_torchvisions_for_the_same_random_numbers(
    height: int, width: int, seed: int, options: tuple[Any, Any]
) -> None:
    expected = torchvisions_box(height, width, *options, np.random.default_rng(seed))
    window = RandomResizedCrop(7, *options).window(height, width, np.random.default_rng(seed))
    top, left, box_height, box_width = window.box
    assume(min(expected) >= 0 and 0 not in expected[2:])  # torchvision takes no pixel of an image one pixel wide; shmload takes one
    assert expected == (top, left, box_height, box_width)
    assert window.clip == (top, left, top + box_height, left + box_width)


def test_random_crops_have_the_requested_areas_and_aspects() -> None:
    rng = np.random.default_rng(5)
    crop = RandomResizedCrop(8, scale=(0.1, 0.4), ratio=(0.5, 2.0))
    boxes = np.array([crop.window(1000, 1000, rng).box for _ in range(4000)])
    areas, aspects = boxes[:, 2] * boxes[:, 3] / 1e6, np.log(boxes[:, 3] / boxes[:, 2])
    assert 0.0995 < areas.min() < areas.max() < 0.4005
    assert abs(areas.mean() - 0.25) < 0.006
    assert abs(aspects).max() < math.log(2) + 0.01
    assert abs(aspects.mean()) < 0.03
    assert abs(aspects.std() - math.log(4) / math.sqrt(12)) < 0.01
    tops = boxes[:, 0] / (1000 - boxes[:, 2])
    assert abs(tops.mean() - 0.5) < 0.02


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 500), (500, 1), (2, 3)])
def test_random_crop_is_inside_the_image(height: int, width: int) -> None:
    for _ in range(50):
        top, left, bottom, right = RandomResizedCrop(4).window(height, width, RNG).clip
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width


@settings(max_examples=100, deadline=None)
@given(SIDES, SIDES)
def test_center_crop_of_a_resized_image_is_one_window_of_the_original(height: int, width: int) -> None:
    size, (top, left, box_height, box_width), clip = CenterCrop((20, 30), resize=40).window(height, width, RNG)
    assert (size, clip) == ((20, 30), (0, 0, height, width))
    long = int(40 * max(height, width) / min(height, width))
    resized = (long, 40) if width <= height else (40, long)
    assert math.isclose(round((resized[0] - 20) / 2), top * resized[0] / height, abs_tol=1e-6)
    assert math.isclose(round((resized[1] - 30) / 2), left * resized[1] / width, abs_tol=1e-6)
    assert math.isclose(20, box_height * resized[0] / height)
    assert math.isclose(30, box_width * resized[1] / width)
    assert -1e-9 <= top <= top + box_height <= height + 1e-6
    assert -1e-9 <= left <= left + box_width <= width + 1e-6


def test_resize_to_one_side_keeps_the_aspect(photo: Image.Image) -> None:
    assert Resize(30).shape == (None, None)
    assert Window((30, 40), (0.0, 0.0, 90.0, 120.0), (0, 0, 90, 120)) == Resize(30).window(90, 120, RNG)
    assert Resize(30).window(120, 90, RNG).size == (40, 30)
    assert (5, 50) == Resize((5, 50)).shape == Resize([5, 50]).window(90, 120, RNG).size


def test_window_of_the_whole_image() -> None:
    assert Window((3, 4), (0.0, 0.0, 3.0, 4.0), (0, 0, 3, 4)) == Whole().window(3, 4, RNG)


def test_crops_compare_hash_and_pickle_by_value() -> None:
    assert RandomResizedCrop(4) == RandomResizedCrop(4)
    assert Counter([CenterCrop(4), CenterCrop(4)])[CenterCrop(4)] == 2


def padded(image: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """functional.center_crop of torchvision 0.28, for an HWC array instead of a picture."""
    tall, wide = max(height - image.shape[0], 0), max(width - image.shape[1], 0)
    image = np.pad(image, ((tall // 2, (tall + 1) // 2), (wide // 2, (wide + 1) // 2), (0, 0)))
    top, left = round((image.shape[0] - height) / 2.0), round((image.shape[1] - width) / 2.0)
    return image[top : top + height, left : left + width]


@pytest.mark.slow(reason="hypothesis encodes and decodes many images")
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), st.booleans())
def test_center_crop_equals_torchvisions_even_if_the_image_is_smaller(
    height: int, width: int, tall: int, wide: int, is_flipped: bool
) -> None:
    image = np.random.default_rng(1).integers(1, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    wanted = padded(image, tall, wide)[:, :: -1 if is_flipped else 1]
    found = ImageDecoder(CenterCrop((tall, wide)), flip=float(is_flipped), layout="HWC")(file.getvalue())
    np.testing.assert_array_equal(wanted, found)
    found = ImageDecoder(CenterCrop((tall, wide)), flip=float(is_flipped))(file.getvalue())
    np.testing.assert_array_equal(wanted.transpose(2, 0, 1), found)


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_black_padding_of_a_small_image_is_normalized(photo: Image.Image, layout: Any) -> None:
    file = io.BytesIO()
    photo.save(file, "PNG")
    decoder = ImageDecoder(CenterCrop(130), normalize=((0.5, 0.4, 0.3), (0.2, 0.2, 0.1)), layout=layout)
    corner = decoder(file.getvalue())[:, 0, 0] if layout == "CHW" else decoder(file.getvalue())[0, 0]
    np.testing.assert_allclose(corner, [-2.5, -2.0, -3.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(0), "RandomResizedCrop: size needs one or two whole numbers of pixels, at least 1; got 0"),
        (lambda: Resize((1, 2, 3)), r"Resize: size needs one or two .* got \(1, 2, 3\)"),
        (lambda: CenterCrop(2.5), "CenterCrop: size needs"),
        (lambda: RandomResizedCrop(4, scale=(0.5, 0.1)), "scale needs 0 < least <= most <= 1; got"),
        (lambda: RandomResizedCrop(4, ratio=(0, 1)), "ratio needs 0 < least <= most; got"),
        (lambda: CenterCrop(8, resize=7), r"resize is the shorter side and needs to be at least size; got 7 for \(8, 8\)"),
    ],
)
def test_invalid_options_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
