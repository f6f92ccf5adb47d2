"""Images are rotated as by Pillow's `ImageOps.exif_transpose`, for every kind of file and position of the orientation."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin, features

from shmload.formats import ImageDecoder, RandomResizedCrop, Resize
from tests.formats.images.jpegs import after_app0, segment

Encode = Callable[..., bytes]


def exif_of(turn: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif.tobytes()


def xmp_of(turn: int, *, is_attribute: bool = True) -> bytes:
    rest = f' tiff:Orientation="{turn}"/>' if is_attribute else f"><tiff:Orientation>{turn}</tiff:Orientation></rdf:Description>"
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description{rest}</rdf:RDF></x:xmpmeta>'.encode()


def after_tables(jpeg: bytes, *added: bytes) -> bytes:
    at = jpeg.index(b"\xff\xda")
    return jpeg[:at] + b"".join(added) + jpeg[at:]


def chunk(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + kind + payload + zlib.crc32(kind + payload).to_bytes(4)


def raw_profile(turn: int) -> str:
    data = exif_of(turn)
    return f"\nexif\n{len(data):8}\n{data.hex()}\n"


def png_text(turn: int, *, is_compressed: bool, is_international: bool) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    if is_international:
        info.add_itxt("Raw profile type exif", raw_profile(turn), zip=is_compressed)
    else:
        info.add_text("Raw profile type exif", raw_profile(turn), zip=is_compressed)
    return info


def xmp_in_png(turn: int) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp_of(turn).decode())
    return info


ICC = [segment(0xE2, b"ICC_PROFILE\0" + bytes((n, 2)) + bytes(40_000)) for n in (1, 2)]
APP1_XMP = b"http://ns.adobe.com/xap/1.0/\0"
TAG_TIFF = 0x0112


def jpeg_exif(save: Encode, turn: int) -> bytes:
    return save("JPEG", exif=exif_of(turn))


def mpo(save: Encode, turn: int) -> bytes:
    return save("MPO", exif=exif_of(turn), save_all=True, append_images=[Image.new("RGB", (30, 20))])


KINDS: dict[str, Callable[[Encode, int], bytes]] = {
    "JPEG, EXIF first": jpeg_exif,
    "JPEG, EXIF after 80 kB": lambda save, turn: after_app0(save("JPEG"), *ICC, segment(0xE1, exif_of(turn))),
    "JPEG, EXIF last": lambda save, turn: after_tables(save("JPEG"), segment(0xE1, exif_of(turn))),
    "JPEG, progressive": lambda save, turn: save("JPEG", exif=exif_of(turn), progressive=True),
    "JPEG, CMYK": lambda save, turn: save("JPEG", "CMYK", exif=exif_of(turn)),
    "JPEG, gray": lambda save, turn: save("JPEG", "L", exif=exif_of(turn)),
    "JPEG, XMP": lambda save, turn: after_app0(save("JPEG"), segment(0xE1, APP1_XMP + xmp_of(turn))),
    "JPEG, XMP element": lambda save, turn: after_tables(save("JPEG"), segment(0xE1, APP1_XMP + xmp_of(turn, is_attribute=False))),
    "JPEG, EXIF and XMP": lambda save, turn: after_app0(
        save("JPEG"), segment(0xE1, APP1_XMP + xmp_of(turn % 8 + 1)), segment(0xE1, exif_of(turn))
    ),
    "JPEG, junk before EXIF": lambda save, turn: after_app0(save("JPEG"), bytes(3), segment(0xE1, exif_of(turn))),
    "MPO": mpo,
    "PNG, eXIf": lambda save, turn: save("PNG", exif=exif_of(turn)),
    "PNG, eXIf at the end": lambda save, turn: save("PNG")[:-12] + chunk(b"eXIf", exif_of(turn)[6:]) + chunk(b"IEND", b""),
    "PNG, tEXt": lambda save, turn: save("PNG", pnginfo=png_text(turn, is_compressed=False, is_international=False)),
    "PNG, zTXt": lambda save, turn: save("PNG", pnginfo=png_text(turn, is_compressed=True, is_international=False)),
    "PNG, iTXt": lambda save, turn: save("PNG", pnginfo=png_text(turn, is_compressed=True, is_international=True)),
    "PNG, XMP": lambda save, turn: save("PNG", pnginfo=xmp_in_png(turn)),
    "WebP, EXIF": lambda save, turn: save("WEBP", lossless=True, exif=exif_of(turn)),
    "WebP, XMP": lambda save, turn: save("WEBP", lossless=True, xmp=xmp_of(turn)),
    "TIFF": lambda save, turn: save("TIFF", tiffinfo={TAG_TIFF: turn}),
    "TIFF, compressed": lambda save, turn: save("TIFF", tiffinfo={TAG_TIFF: turn}, compression="tiff_lzw"),
    **({"AVIF": lambda save, turn: save("AVIF", exif=exif_of(turn))} if features.check("avif") else {}),
}


@pytest.fixture
def save(photo: Image.Image, encode: Encode) -> Encode:
    picture = photo.resize((50, 40))
    return lambda kind, mode="RGB", **options: encode(picture.convert(mode), kind, **options)


def by_pillow(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


@pytest.mark.slow(reason="writes and decodes files of every kind")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_rotated_as_by_pillow(save: Encode, kind: str) -> None:
    found_turned = 0
    for turn in range(1, 9):
        data = KINDS[kind](save, turn)
        expected = np.asarray(by_pillow(data))
        for decoder in ("auto", "libjpeg", "simplejpeg", "pillow"):
            found = ImageDecoder(layout="HWC", upright=True, decoder=decoder)(data)
            assert np.array_equal(expected, found), (turn, decoder)
        found_turned += found.shape == (50, 40, 3)
    assert found_turned == 4  # orientations 5 to 8


@pytest.mark.slow(reason="writes and decodes files of every kind")
@pytest.mark.parametrize("kind", KINDS)
def test_crops_equal_those_of_the_image_rotated_by_pillow(save: Encode, encode: Encode, kind: str) -> None:
    for turn in (6, 7):
        data = KINDS[kind](save, turn)
        turned = encode(by_pillow(data), "PNG")
        for crop in (RandomResizedCrop(9), Resize((12, 31)), Resize((2, 2))):
            found = []
            for upright, each in ((True, data), (False, turned)):
                random.seed(turn)
                found.append(ImageDecoder(crop, upright=upright, flip=0.5, scaled=False)(each))
            assert np.array_equal(*found)


def test_scaled_images_are_rotated(photos: list[Any]) -> None:
    turned = after_app0(photos[0].read_bytes(), *ICC, segment(0xE1, exif_of(6)))
    small = Resize((60, 40))
    exact = ImageDecoder(small, upright=True, scaled=False)(turned).astype(int)
    for decoder in ("libjpeg", "simplejpeg", "pillow"):
        found = ImageDecoder(small, upright=True, decoder=decoder)(turned)
        assert 0 < np.abs(exact - found).mean() < 2


def test_pixel_data_that_looks_like_an_orientation_is_ignored(save: Encode) -> None:
    data = save("JPEG")
    at = data.index(b"\xff\xda")
    comment = segment(0xFE, b'Exif tiff:Orientation="6"')
    assert ImageDecoder(layout="HWC", upright=True)(data[:at] + comment + data[at:]).shape == (40, 50, 3)
    assert ImageDecoder(layout="HWC", upright=True)(data + segment(0xE1, exif_of(6))).shape == (40, 50, 3)
