"""Which images a folder holds, and of which class: as torchvision's ImageFolder finds them, in its order."""

from __future__ import annotations

import os
from collections.abc import Iterator

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def find_classes(root: str) -> list[str]:
    """Names of the classes: folders in `root`, sorted.

    Raises:
        FileNotFoundError: there is none.
    """
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        raise FileNotFoundError(f"{root}: one folder for each class is needed; there is none")
    return classes


def find_images(root: str, classes: list[str]) -> Iterator[tuple[str, int]]:
    """(path, number of its class), class by class; in each, folder by folder, sorted.

    Raises:
        FileNotFoundError: a class has no image.
    """
    empty = []
    for number, name in enumerate(classes):
        count = 0
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(EXTENSIONS):
                    count += 1
                    yield os.path.join(folder, file), number
        if not count:
            empty.append(name)
    if empty:
        raise FileNotFoundError(f"{root}: no image ({', '.join(EXTENSIONS)}) of {', '.join(empty)}")
