"""Fixtures with a photograph, encoded as other programs write it."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shmload
from shmload.formats.images.crops import Window
from shmload.formats.images.libjpeg import unbound

PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
Encode = Callable[..., bytes]


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """Returns a photograph of 120 x 90 pixels."""
    with Image.open(PHOTOS[2]) as opened:
        return opened.convert("RGB").crop((100, 60, 220, 150))


@pytest.fixture(scope="session")
def libjpeg() -> None:
    """Skips the test if Pillow's libjpeg-turbo cannot be used."""
    if why_not := unbound():
        pytest.skip(why_not)


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """Returns the paths of the photographs of about 500 x 375 that are part of the package."""
    return PHOTOS


@pytest.fixture
def encode() -> Encode:
    """Returns a function (picture, kind, options) that returns the bytes of a file."""

    def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
        file = io.BytesIO()
        picture.save(file, kind, **options)
        return file.getvalue()

    return encoded


@pytest.fixture(scope="session")
def by_pillow() -> Callable[[Image.Image, Window], np.ndarray[Any, Any]]:
    """Returns a function that resizes a window with Pillow, to the shape (height, width, 3)."""

    def resized(picture: Image.Image, window: Window) -> np.ndarray[Any, Any]:
        top, left, bottom, right = window.clip
        y, x, height, width = window.box
        part = picture.crop((left, top, right, bottom))
        box = (x - left, y - top, min(x - left + width, right - left), min(y - top + height, bottom - top))
        return np.asarray(part.resize(window.size[::-1], Image.Resampling.BILINEAR, box=box))

    return resized


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Returns a function that makes some modules look uninstalled."""
    real = builtins.__import__

    def hide(*names: str) -> None:
        def importer(name: str, *rest: Any) -> Any:
            if name.split(".")[0] in names:
                raise ImportError(f"No module named {name!r}")
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", importer)
        unbound.cache_clear()

    yield hide
    unbound.cache_clear()
