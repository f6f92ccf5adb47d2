"""The pictures among samples, and a grid of them."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.inspect.formats import picture_format
from shmload.tools.inspect.summary import Summary

GRID = 16  # pictures
SIDE = 200  # pixels of each


def picture_of(sample: Mapping[str, Any]) -> Any:
    """The first value of a sample that is a picture, as an image of Pillow's; None if there is none."""
    from PIL import Image

    for value in sample.values():
        if isinstance(value, bytes) and picture_format(value) is not None:
            with suppress(Exception):  # bytes that only begin like a picture
                return Image.open(io.BytesIO(value)).convert("RGB")
        elif isinstance(value, np.ndarray) and (array := _colours_last(value)) is not None:
            if array.dtype != np.uint8:
                low, high = float(array.min()), float(array.max())
                array = ((array.astype(np.float64) - low) * (255 / (high - low or 1.0))).astype(np.uint8)
            return Image.fromarray(array).convert("RGB")
    return None


def _colours_last(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """An array as height, width and perhaps colours; None if it can be no picture."""
    if value.ndim == 3 and value.shape[-1] not in (1, 3, 4) and value.shape[0] in (1, 3, 4):
        value = np.moveaxis(value, 0, -1)
    if value.ndim == 3 and value.shape[-1] == 1:
        value = value[..., 0]
    is_picture = value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in (3, 4))
    return value if is_picture and value.dtype.kind in "uf" and min(value.shape[:2]) >= 4 else None


def save_grid(summaries: list[Summary], path: Path) -> int:
    """Writes a PNG of the first pictures of each path, one after the other; how many there are."""
    from PIL import Image

    samples = [sample for summary in summaries for sample in summary.samples[:GRID]]
    pictures = [picture for sample in samples if (picture := picture_of(sample)) is not None]
    columns = min(math.ceil(math.sqrt(len(pictures))), 8)
    if not pictures:
        return 0
    grid = Image.new("RGB", (SIDE * columns, SIDE * math.ceil(len(pictures) / columns)), "white")
    for number, picture in enumerate(pictures):
        scale = (SIDE - 8) / max(picture.size)
        resized = picture.resize([max(round(extent * scale), 1) for extent in picture.size])
        grid.paste(resized, (SIDE * (number % columns) + 4, SIDE * (number // columns) + 4))
    grid.save(path, "PNG")
    return len(pictures)
