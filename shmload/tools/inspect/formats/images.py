"""Folders of pictures, a class a subfolder perhaps; and single pictures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.inspect.summary import SIZED, Head, Sizes, Summary

NAME = "images"
_MAGICS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}


def kind_of(begin: bytes) -> str | None:
    """What picture format some bytes begin as."""
    if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP":
        return "WebP"
    return next((kind for magic, kind in _MAGICS.items() if begin.startswith(magic)), None)


def matches(head: Head) -> bool:
    if head.compression:
        return False
    if head.is_folder:
        return next(_pictures(head.path), None) is not None
    return head.begin[:2] != b"BM" and kind_of(head.begin) is not None  # two bytes prove nothing outside a folder


def describe(head: Head, num_samples: int) -> Summary:
    found = list(_pictures(head.path)) if head.is_folder else [(head.path, kind_of(head.begin) or "")]
    paths = [path for path, _ in found]
    kinds = Counter(kind for _, kind in found)
    sizes = [path.stat().st_size for path in paths]
    summary = Summary(str(head.path), NAME, sum(sizes), len(paths), {"image": "uint8 (any, any, 3)"}, Sizes.of(sizes))
    summary.notes.append(", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))
    classes = sorted(
        {path.relative_to(head.path).parts[0] for path in paths if len(path.relative_to(head.path).parts) > 1}
    )
    if head.is_folder and classes:
        summary.fields["label"] = (
            f"int64: {len(classes)} folders, {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}"
        )
    shapes = [_shape(path) for path in paths[:SIZED]]
    widths, heights = zip(*((width, height) for width, height, _ in shapes), strict=True)
    modes = Counter(mode for _, _, mode in shapes)
    summary.notes.append(
        f"widths {min(widths)} to {max(widths)}, heights {min(heights)} to {max(heights)}, "
        + ", ".join(f"{mode} ({count:,})" for mode, count in modes.most_common())
        + (f", of the first {SIZED:,}" if len(paths) > SIZED else "")
    )
    summary.samples = [
        {"name": str(path.relative_to(head.path)) if head.is_folder else path.name, "image": _decoded(path)}
        for path in paths[:num_samples]
    ]
    return summary


def _pictures(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, format) of the pictures below a folder, in the order of their names."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            with open(path, "rb") as file:
                kind = kind_of(file.read(16))
            if kind is not None:
                yield path, kind


def _shape(path: Path) -> tuple[int, int, str]:
    """Width, height and mode, from the header alone."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return *image.size, image.mode
    except Exception as error:  # Pillow's many decoders fail in ways of their own
        raise ValueError(f"{path}: the picture is damaged: {error}") from error


def _decoded(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # as above
        raise ValueError(f"{path}: the picture is damaged: {error}") from error
