"""MaskDecoder gives the class numbers of masks, at the places of Pillow's NEAREST, aligned with the sample's image."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shmload import ShmLoader
from shmload.formats import CenterCrop, ImageDecoder, MaskDecoder, RandomResizedCrop, Resize, TarDataset, TarWriter

CLASSES = np.random.default_rng(1).integers(0, 21, (13, 17), dtype=np.uint8)


def encoded(pixels: Any, mode: str | None = None, kind: str = "png") -> bytes:
    picture = Image.fromarray(pixels)
    if mode == "P":
        picture = Image.new("P", picture.size)
        picture.putdata(pixels.reshape(-1).tolist())
        picture.putpalette([value for number in range(256) for value in (number * 9 % 256, number * 37 % 256, number * 91 % 256)])
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "gif"])
@pytest.mark.parametrize("mode", ["L", "P"])
def test_gray_and_palette_images_give_their_numbers(kind: str, mode: str) -> None:
    if kind == "gif":  # reorders a palette
        mode = "L"
    found = MaskDecoder()(encoded(CLASSES, mode, kind))
    assert (found.dtype, found.tolist()) == (np.uint8, CLASSES.tolist())
    assert MaskDecoder(dtype="int64")(encoded(CLASSES, mode, kind)).dtype == np.int64


def test_black_and_white_images_give_0_and_1() -> None:
    assert MaskDecoder()(encoded(CLASSES > 10)).tolist() == (CLASSES > 10).astype(int).tolist()


def test_numbers_of_16_bits_need_int64() -> None:
    wide = encoded(CLASSES.astype(np.uint16) * 300)
    assert MaskDecoder(dtype="int64")(wide).tolist() == (CLASSES.astype(int) * 300).tolist()
    with pytest.raises(ValueError, match=r'has class 6000, which is too large for uint8: give MaskDecoder\(dtype="int64"\)'):
        MaskDecoder()(wide)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="the mask has a negative number, -3, which is no class"):
        MaskDecoder(dtype="int64")(encoded(np.array([[-3, 5]], np.int32), kind="tiff"))


@given(st.integers(1, 40), st.integers(1, 40))
def test_resizing_takes_pillows_nearest_pixels(height: int, width: int) -> None:
    expected = np.asarray(Image.fromarray(CLASSES).resize((width, height), Image.Resampling.NEAREST))
    assert MaskDecoder(Resize((height, width)))(encoded(CLASSES)).tolist() == expected.tolist()


@pytest.mark.parametrize(("size", "to"), [(512, 224), (375, 224), (224, 512), (96, 224), (189, 56)])
def test_ties_between_two_pixels_fall_as_in_pillow(size: int, to: int) -> None:
    """Pillow adds the step to the last place, so its rounding errors decide them."""
    classes = np.random.default_rng(0).integers(0, 250, (size, size), np.uint8)
    expected = np.asarray(Image.fromarray(classes).resize((to, to), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(MaskDecoder(Resize((to, to)))(encoded(classes)), expected)


@pytest.mark.parametrize(("size", "resize"), [(8, None), (8, 26), (9, 13)])
def test_center_crop_equals_pillows_resize_and_crop(size: int, resize: int | None) -> None:
    picture = Image.fromarray(CLASSES)
    if resize is not None:
        picture = picture.resize((17 * resize // 13, resize), Image.Resampling.NEAREST)
    left, top = round((picture.width - size) / 2), round((picture.height - size) / 2)
    expected = np.asarray(picture.crop((left, top, left + size, top + size)))
    assert MaskDecoder(CenterCrop(size, resize))(encoded(CLASSES)).tolist() == expected.tolist()


def test_pixels_outside_of_a_small_mask_have_the_given_class() -> None:
    found = MaskDecoder(CenterCrop(19), fill=255)(encoded(CLASSES))
    assert found[3:16, 1:18].tolist() == CLASSES.tolist()
    assert (found == 255).sum() == 19 * 19 - CLASSES.size


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_crops_and_flips_are_those_of_the_image(num_workers: int, tmp_path: Path) -> None:
    ramp = np.arange(200, dtype=np.uint8)
    pixels = np.stack(
        [np.broadcast_to(ramp, (200, 200)), np.broadcast_to(ramp[:, None], (200, 200)), np.zeros((200, 200), np.uint8)], -1
    )
    with TarWriter(tmp_path / "a.tar") as writer:
        for number in range(16):
            column_of_each_pixel = encoded(np.ascontiguousarray(pixels[:, :, 0]), "P")
            writer.write({"__key__": str(number), "png": encoded(pixels), "mask.png": column_of_each_pixel})
    crop = RandomResizedCrop(40, scale=(0.1, 0.9))
    decode: Any = {"png": ImageDecoder(crop, flip=0.5), "mask.png": MaskDecoder(crop, flip=0.5)}
    dataset = TarDataset(tmp_path / "a.tar", decode=decode, schema={name: decoder.spec for name, decoder in decode.items()})
    directions = set()
    with ShmLoader(dataset, batch_size=4, seed=1, num_workers=num_workers) as loader:
        for batch in loader:
            assert batch["mask.png"].shape == (4, 40, 40)
            differences = (batch["png"][:, 0].int() - batch["mask.png"].int()).abs()
            assert int(differences[:, :, 2:-2].max()) <= 3  # bilinear beside nearest
            directions |= {bool(each[0, 0] < each[0, -1]) for each in batch["mask.png"]}
    assert directions == {True, False}


def test_colors_are_refused() -> None:
    with pytest.raises(ValueError, match="a picture of mode RGB has no class numbers: a mask has one channel"):
        MaskDecoder()(encoded(np.zeros((4, 4, 3), np.uint8)))


@pytest.mark.parametrize("data", [b"", b"not an image", encoded(CLASSES)[:60]])
def test_files_that_are_no_images_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        MaskDecoder()(data)


def test_large_masks_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ValueError, match="the mask has 17 x 13 pixels, more than max_pixels=200"):
        MaskDecoder(max_pixels=200)(encoded(CLASSES))


@pytest.mark.parametrize(
    ("options", "error"),
    [({"crop": 3}, TypeError), ({"flip": 2}, ValueError), ({"dtype": "float32"}, ValueError), ({"fill": 256}, ValueError)],
)
def test_invalid_options_are_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        MaskDecoder(**options)


def test_decoders_can_be_compared_and_pickled() -> None:
    decoder = MaskDecoder(CenterCrop(8), fill=3)
    assert pickle.loads(pickle.dumps(decoder)) == decoder
    assert decoder.spec == ("uint8", (8, 8))
