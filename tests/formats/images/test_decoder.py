from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from shmload.formats import CenterCrop, ImageDecoder, RandomResizedCrop, Resize
from shmload.formats.images.crops import Window
from shmload.formats.images.open_image import SimpleJpeg, open_image
from shmload.formats.images.pillow_image import rgb_picture

Encode = Callable[..., bytes]
ByPillow = Callable[[Image.Image, Window], Any]
AS_STORED = ImageDecoder(layout="HWC")
SCALED_TOLERANCE = 2.0  # mean deviation in levels that ImageDecoder documents


def picture_of(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("decoder", ["auto", "libjpeg", "simplejpeg", "pillow"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30, "subsampling": 1}])
def test_jpeg_decodes_as_with_pillow(photo: Image.Image, encode: Encode, decoder: Any, options: Any) -> None:
    data = encode(photo, **options)
    assert np.array_equal(np.asarray(picture_of(data)), ImageDecoder(layout="HWC", decoder=decoder)(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "I;16"])
def test_a_png_of_any_mode_becomes_rgb(photo: Image.Image, encode: Encode, mode: str) -> None:
    if mode == "I;16":
        stored = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
        expected = photo.convert("L").convert("RGB")
    else:
        stored = photo.convert("RGB").quantize(60) if mode == "P" else photo.convert(mode)
        expected = stored.convert("RGB")
    found = AS_STORED(encode(stored, "PNG"))
    assert np.array_equal(np.asarray(expected), found)


def test_grey_and_cmyk_jpegs_become_rgb(photo: Image.Image, encode: Encode) -> None:
    for mode in ("L", "CMYK"):
        data = encode(photo.convert(mode))
        assert np.array_equal(np.asarray(picture_of(data)), AS_STORED(data))


def test_palette_with_transparency_becomes_rgb_without_a_warning(photo: Image.Image, encode: Encode) -> None:
    palette = photo.quantize(20)
    data = encode(palette, "PNG", transparency=bytes(range(20)))
    assert np.array_equal(np.asarray(palette.convert("RGB")), AS_STORED(data))


def test_32_bit_images_are_an_error_because_their_range_is_unknown(photo: Image.Image, encode: Encode) -> None:
    with pytest.raises(ValueError, match="an image of mode 'F', 32 bits without a range; convert it to 8 bits beforehand"):
        AS_STORED(encode(photo.convert("F"), "TIFF"))
    assert np.array_equal(np.asarray(rgb_picture(photo)), np.asarray(photo))


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_rotated_upright_only_on_request(photo: Image.Image, encode: Encode, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encode(photo, exif=exif)
    assert np.array_equal(np.asarray(picture_of(data)), AS_STORED(data))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(upright, ImageDecoder(layout="HWC", upright=True)(data))


def test_format_is_detected_from_the_bytes(photo: Image.Image, encode: Encode) -> None:
    for kind in ("PNG", "BMP", "WEBP", "GIF", "PPM"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encode(photo, kind, **options)
        assert np.array_equal(np.asarray(picture_of(data)), AS_STORED(data))


@pytest.mark.parametrize(
    "crop",
    [RandomResizedCrop(33), RandomResizedCrop((20, 47)), CenterCrop(32), CenterCrop(32, resize=40), Resize((50, 31)), Resize(64)],
)
def test_crop_is_within_one_level_of_pillows(photo: Image.Image, encode: Encode, by_pillow: ByPillow, crop: Any) -> None:
    data = encode(photo)
    random.seed(3)
    found = ImageDecoder(crop, layout="HWC")(data).astype(int)
    random.seed(3)
    rng = np.random.default_rng(random.getrandbits(128))
    expected = by_pillow(picture_of(data), crop.window(photo.height, photo.width, rng))
    assert np.abs(found - expected).max() <= 1


def test_center_crop_equals_pillows_resize_and_crop(photo: Image.Image, encode: Encode) -> None:
    data = encode(photo)
    resized = picture_of(data).resize((int(40 * 120 / 90), 40), Image.Resampling.BILINEAR)
    left = round((resized.width - 32) / 2)
    expected = np.asarray(resized.crop((left, 4, left + 32, 36))).astype(int)
    assert np.abs(expected - ImageDecoder(CenterCrop(32, resize=40), layout="HWC")(data)).max() <= 1


@pytest.mark.slow(reason="decodes every photograph six times")
@pytest.mark.parametrize("decoder", ["libjpeg", "simplejpeg", "pillow"])
def test_scaled_decoding_stays_within_its_tolerance(photos: list[Path], decoder: Any) -> None:
    deviations = []
    for path in photos:
        data = path.read_bytes()
        for crop in (Resize((80, 80)), Resize((40, 41)), CenterCrop(50, resize=60)):
            exact, shrunk = (ImageDecoder(crop, scaled=scaled, decoder=decoder)(data).astype(int) for scaled in (False, True))
            assert not np.array_equal(exact, shrunk)
            deviations.append(np.abs(exact - shrunk).mean())
    assert max(deviations) < SCALED_TOLERANCE


def test_crop_smaller_than_four_times_the_result_is_decoded_exactly(photos: list[Path]) -> None:
    data = photos[0].read_bytes()
    height, width = picture_of(data).size[::-1]
    crop = Resize((height // 4 + 1, width // 4 + 1))
    assert np.array_equal(ImageDecoder(crop, scaled=False)(data), ImageDecoder(crop)(data))


def test_fast_dct_stays_within_its_tolerance(photos: list[Path]) -> None:
    data = photos[0].read_bytes()
    exact, fast = (ImageDecoder(fast=fast)(data).astype(int) for fast in (False, True))
    assert 0 < np.abs(exact - fast).mean() < SCALED_TOLERANCE


def test_layout_dtype_and_normalization_equal_torchvisions(photo: Image.Image, encode: Encode) -> None:
    import torch

    data = encode(photo)
    plain = torch.from_numpy(AS_STORED(data)).permute(2, 0, 1)
    assert torch.equal(plain, torch.from_numpy(ImageDecoder()(data)))
    unit = plain.to(torch.float32).div(255)
    assert torch.equal(unit, torch.from_numpy(ImageDecoder(dtype="float32")(data)))
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = unit.sub(torch.tensor(mean)[:, None, None]).div(torch.tensor(deviation)[:, None, None])
    assert torch.equal(expected, torch.from_numpy(ImageDecoder(normalize=(mean, deviation))(data)))
    assert torch.equal(expected.permute(1, 2, 0), torch.from_numpy(ImageDecoder(normalize=(mean, deviation), layout="HWC")(data)))


def test_flips_have_the_requested_probability(photo: Image.Image, encode: Encode) -> None:
    data = encode(photo.crop((0, 0, 9, 8)))
    stored = ImageDecoder()(data)
    random.seed(1)
    found = [ImageDecoder(flip=0.25)(data) for _ in range(400)]
    flipped = sum(np.array_equal(stored[:, :, ::-1], each) for each in found)
    assert flipped + sum(np.array_equal(stored, each) for each in found) == 400
    assert 70 < flipped < 130
    assert np.array_equal(stored[:, :, ::-1], ImageDecoder(flip=1)(data))


def test_spec_describes_the_result(photo: Image.Image, encode: Encode) -> None:
    assert ImageDecoder(Resize((5, 6))).spec == ("uint8", (3, 5, 6))
    assert ImageDecoder(Resize((5, 6)), layout="HWC", dtype="float32").spec == ("float32", (5, 6, 3))
    assert ("uint8", (3, None, None)) == ImageDecoder().spec == ImageDecoder(Resize(5)).spec
    found = ImageDecoder(Resize((5, 6)), layout="HWC", dtype="float32")(encode(photo))
    assert (found.dtype.name, found.shape) == (("float32", (5, 6, 3)))


def test_strided_output_is_written(photo: Image.Image, encode: Encode) -> None:
    data, decoder = encode(photo), ImageDecoder(Resize((5, 6)))
    wide = np.zeros((3, 5, 12), np.uint8)
    decoder.decode(data, lambda shape: wide[:, :, ::2])
    assert np.array_equal(decoder(data), wide[:, :, ::2])
    assert not wide[:, :, 1::2].any()


def test_decoder_is_hashable_and_shared_by_threads(photo: Image.Image, encode: Encode) -> None:
    decoder = ImageDecoder(Resize((15, 16)), flip=0.5)
    assert pickle.loads(pickle.dumps(decoder)) == decoder == ImageDecoder(Resize((15, 16)), flip=0.5)
    files = [encode(photo.rotate(10 * n)) for n in range(24)]
    still = ImageDecoder(Resize((15, 16)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(still, files))
    assert all(np.array_equal(still(data), each) for data, each in zip(files, found, strict=True))


@pytest.mark.parametrize("decoder", ["libjpeg", "simplejpeg", "pillow"])
def test_truncated_jpeg_is_an_error(photo: Image.Image, encode: Encode, decoder: Any) -> None:
    data = encode(photo)
    for end in [0, 1, 2, 3, 10, *range(20, len(data), 97), len(data) - 1]:
        with pytest.raises(ValueError, match=r"\S"):
            ImageDecoder(Resize((4, 4)), decoder=decoder)(data[:end])


def test_damage_within_a_scan_is_an_error_unless_strict_is_false(photo: Image.Image, encode: Encode) -> None:
    data = bytearray(encode(photo))
    middle = len(data) // 2
    data[middle : middle + 2] = b"\xff\xd3"  # a restart marker where none is allowed
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        AS_STORED(bytes(data))
    assert ImageDecoder(layout="HWC", strict=False)(bytes(data)).shape == (90, 120, 3)


def test_undecodable_image_never_contains_the_previous_image(photo: Image.Image, encode: Encode) -> None:
    data = bytearray(encode(photo, progressive=True))
    second_scan = data.index(b"\xff\xda", data.index(b"\xff\xda") + 1)
    data[second_scan + 5 + 2 * data[second_scan + 4]] = 0xFF  # an invalid first coefficient of the scan
    data[second_scan:second_scan] = b"zz"  # makes simplejpeg treat what follows as a warning
    lenient = ImageDecoder(Resize((4, 4)), decoder="simplejpeg", strict=False)
    assert lenient(encode(photo)).any()
    assert not lenient(bytes(data)).any()
    with pytest.raises(ValueError, match="Invalid progressive"):
        ImageDecoder(Resize((4, 4)), decoder="libjpeg", strict=False)(bytes(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an empty file"),
        (
            b"GIF89a",
            "Pillow does not recognize this image: 6 bytes, beginning with b'GIF89a'|UnidentifiedImageError|truncated|index",
        ),
        (b"Hello, world", "Pillow does not recognize this image: 12 bytes, beginning with b'Hello, w'"),
        (b"\xff\xd8\xff\xd9", "a JPEG that ends at byte 4, before its image begins"),
    ],
)
def test_data_that_is_not_an_image_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AS_STORED(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_image_over_max_pixels_is_an_error_before_it_is_decoded(photo: Image.Image, encode: Encode, kind: str) -> None:
    data = encode(photo, kind)
    with pytest.raises(ValueError, match="90 x 120 pixels are more than max_pixels=10799; raise max_pixels if the file is"):
        ImageDecoder(max_pixels=10799)(data)
    assert ImageDecoder(max_pixels=10800)(data).shape == (3, 90, 120)


def test_decompression_bomb_is_an_error_before_memory_is_allocated(encode: Encode, photo: Image.Image) -> None:
    data = bytearray(encode(photo))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(ValueError, match="65535 x 65535 pixels are more than max_pixels"):
        AS_STORED(bytes(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 1.5}, "flip is a probability and needs to be 0 to 1; got 1.5"),
        ({"layout": "NCHW"}, r"layout needs to be one of \('CHW', 'HWC'\); got 'NCHW'"),
        ({"dtype": "float16"}, "dtype needs to be one of"),
        ({"decoder": "magick"}, "decoder needs to be one of"),
        ({"dtype": "uint8", "normalize": ((0,) * 3, (1,) * 3)}, "normalize makes float32; leave out dtype"),
        ({"normalize": ((0, 0), (1, 1))}, "normalize needs three means and three standard deviations above 0; got"),
        ({"normalize": ((0, 0, 0), (1, 1, 0))}, "normalize needs three means"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageDecoder(**options)


def test_without_libjpeg_simplejpeg_decodes(photo: Image.Image, encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.formats.images.open_image.unbound", lambda: "no libjpeg-turbo")
    opened = open_image(encode(photo), "auto", 10**9, is_strict=True, is_fast=False)
    assert isinstance(opened, SimpleJpeg)


def test_without_simplejpeg_pillow_decodes(photo: Image.Image, encode: Encode, without: Callable[..., None]) -> None:
    data = encode(photo)
    expected = AS_STORED(data)
    without("simplejpeg")
    assert np.array_equal(expected, AS_STORED(data))


def test_missing_library_is_named(photo: Image.Image, encode: Encode, without: Callable[..., None]) -> None:
    data = encode(photo)
    without("simplejpeg", "PIL")
    with pytest.raises(ImportError, match=r"decoding this image needs Pillow: pip install 'shmload\[images\]'"):
        AS_STORED(data)
    with pytest.raises(ImportError, match=r"decoder='libjpeg': Pillow is needed: No module named 'PIL'; pip install"):
        ImageDecoder(decoder="libjpeg")(data)
    with pytest.raises(ImportError, match=r"decoder='simplejpeg' needs simplejpeg: pip install 'shmload\[images\]'"):
        ImageDecoder(decoder="simplejpeg")(data)


@pytest.mark.parametrize("held", [bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8), lambda data: {"bytes": data}])
def test_file_in_any_buffer_or_in_an_image_of_datasets(photo: Image.Image, encode: Encode, held: Callable[..., Any]) -> None:
    for kind in ("JPEG", "PNG"):
        data = encode(photo, kind)
        assert np.array_equal(AS_STORED(data), AS_STORED(held(data)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"bytes": None, "path": "a.png"},
            "stored as its path alone, 'a.png', without its bytes. Store the bytes: datasets does with",
        ),
        ({"pixels": b"", "name": 1}, r"a dict that has them as 'bytes'; this one has \['name', 'pixels'\]"),
        ("a.png", "takes the bytes of an image file, got str. If you have a path, read the file"),
        (
            Image.new("RGB", (1, 1)),
            r"got Image. If you have a path, read the file; if datasets has decoded the pictures, use datasets.Image\(dec",
        ),
        (None, "got NoneType"),
        (np.zeros((2, 2), np.uint8), "got ndarray"),
    ],
)
def test_error_for_values_that_are_not_file_contents_names_a_remedy(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AS_STORED(data)


@pytest.mark.parametrize("crop", [64, 0, (64, 64), lambda image: image, RandomResizedCrop])
def test_crop_that_is_none_is_an_error(crop: Any) -> None:
    with pytest.raises(TypeError, match=r"crop must be RandomResizedCrop\(size\), .* with `shape` and `window`; got "):
        ImageDecoder(crop)
