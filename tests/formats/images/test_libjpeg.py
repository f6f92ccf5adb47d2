"""Decoding only what a crop needs changes no byte, and without libjpeg other decoders are used."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shmload.formats import CenterCrop, ImageDecoder, RandomResizedCrop, Resize
from shmload.formats.images.crops import Window
from shmload.formats.images.libjpeg import unbound

Encode = Callable[..., bytes]
CROPS = [RandomResizedCrop(33), CenterCrop(32), CenterCrop(32, resize=40), CenterCrop(20, resize=90), Resize((50, 31))]


@pytest.mark.parametrize("options", [{}, {"flip": 0.5}, {"upright": True, "layout": "HWC"}, {"dtype": "float32"}])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("crop", [*CROPS, Resize(64), None])
def test_partial_decoding_changes_no_byte(
    photo: Image.Image, encode: Encode, crop: Any, fast: bool, options: dict[str, Any]
) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for data in (encode(photo), encode(photo, subsampling=1, exif=turned), encode(photo.convert("L"))):
        found = []
        for decoder in ("libjpeg", "simplejpeg"):
            random.seed(5)
            found.append(ImageDecoder(crop, fast=fast, decoder=decoder, **options)(data))
        assert np.array_equal(*found)


@pytest.mark.slow(reason="decodes every photograph eight times")
@pytest.mark.parametrize("scaled", [False, True])
def test_partial_decoding_of_photographs_changes_no_byte(photos: list[Path], scaled: bool) -> None:
    for number, path in enumerate(photos * 4):
        crop = (RandomResizedCrop(24 + 40 * (number % 5)), RandomResizedCrop(40), CenterCrop(50, resize=70))[number % 3]
        found = []
        for decoder in ("libjpeg", "simplejpeg"):
            random.seed(number)
            found.append(ImageDecoder(crop, scaled=scaled, flip=0.5, decoder=decoder)(path.read_bytes()))
        assert np.array_equal(*found)


def test_damage_below_the_crop_is_ignored_and_changes_nothing(photo: Image.Image, encode: Encode) -> None:
    @dataclass(frozen=True)
    class Top:
        shape: tuple[int, int] = (10, 20)

        def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
            return Window(self.shape, (0.0, 0.0, 20.0, 40.0), (0, 0, 20, 40))

    data = encode(photo)
    damaged = bytearray(data)
    damaged[len(data) - 300 : len(data) - 298] = b"\xff\xd3"
    decoder = ImageDecoder(Top(), decoder="libjpeg")
    assert np.array_equal(decoder(data), decoder(bytes(damaged)))
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        ImageDecoder(decoder="libjpeg")(bytes(damaged))
    with pytest.raises(ValueError, match=r"a JPEG cut off: .* bytes without an end marker"):
        decoder(data[:-300])


@pytest.mark.parametrize("version", [None, "2.0.6"])
def test_without_pillows_libjpeg_other_decoders_give_the_same_image(
    photo: Image.Image, encode: Encode, without: Callable[..., None], monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    from PIL import _imaging

    data, decoder = encode(photo), ImageDecoder(CenterCrop(20))
    expected = decoder(data)
    monkeypatch.setattr(_imaging, "libjpeg_turbo_version", version)
    without()
    assert f"Pillow with libjpeg-turbo 2.1 or later is needed; it has {version}" == unbound()
    assert np.array_equal(expected, decoder(data))
    with pytest.raises(ImportError, match=r"decoder='libjpeg': Pillow with libjpeg-turbo 2.1 .*; pip install 'shmload\[images\]'"):
        ImageDecoder(decoder="libjpeg")(data)
    without("simplejpeg")
    assert np.array_equal(expected, decoder(data))


def test_error_explains_why_libjpeg_cannot_be_bound(
    photo: Image.Image, encode: Encode, without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import _imaging

    monkeypatch.setattr(_imaging, "__file__", "/nowhere/_imaging.so")
    without()
    assert unbound().startswith("cannot load libjpeg-turbo from /nowhere/_imaging.so: /nowhere/_imaging.so: cannot open")
    assert ImageDecoder(layout="HWC")(encode(photo)).shape == (90, 120, 3)
