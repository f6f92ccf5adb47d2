"""The pictures among samples, and a grid of them."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.inspect.formats import picture_format
from shmload.tools.inspect.summary import Summary

GRID = 16  # pictures


def picture_of(sample: Mapping[str, Any]) -> Any:
    """The first value of a sample that is a picture, as an array of height, width and perhaps colours; None if there is none."""
    for value in sample.values():
        found = _of_bytes(value) if isinstance(value, bytes) else _of_array(value)
        if found is not None:
            return found
    return None


def _of_bytes(data: bytes) -> Any:
    if picture_format(data) is None:
        return None
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:  # bytes that only begin like a picture
        return None


def _of_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "uf" or value.ndim not in (2, 3) or min(value.shape) < 1:
        return None
    if value.ndim == 3 and value.shape[-1] not in (1, 3, 4):
        if value.shape[0] not in (1, 3, 4):
            return None
        value = np.moveaxis(value, 0, -1)  # colours, height, width -> height, width, colours
    if min(value.shape[:2]) < 4:
        return None
    value = value[..., 0] if value.ndim == 3 and value.shape[-1] == 1 else value
    if value.dtype == np.uint8:
        return value
    low, high = float(value.min()), float(value.max())
    return (value.astype(np.float64) - low) / (high - low or 1.0)


def save_grid(summaries: list[Summary], path: Path) -> int:
    """Writes a PNG of the first pictures of each path; how many there are."""
    pictures = [
        (picture, f"{Path(summary.path).name} {number}")
        for summary in summaries
        for number, sample in enumerate(summary.samples[:GRID])
        if (picture := picture_of(sample)) is not None
    ]
    if not pictures:
        return 0
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = min(math.ceil(math.sqrt(len(pictures))), 8)
    rows = math.ceil(len(pictures) / columns)
    shown_or_not = [*pictures, *[None] * (rows * columns - len(pictures))]
    figure = Figure(figsize=(2 * columns, 2.2 * rows), dpi=100, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, shown in zip(places, shown_or_not, strict=True):
        axes.set_axis_off()
        if shown is not None:
            picture, title = shown
            axes.imshow(picture, cmap="gray" if picture.ndim == 2 else None)
            axes.set_title(title, fontsize=7)
    figure.savefig(path, format="png")
    return len(pictures)
