"""The format of plain files: each object, such as an image or a sound, is one sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.file_names import is_hidden
from shmload.formats.head import Head
from shmload.formats.summary import SIZED, Sizes, Summary
from shmload.storage.folder_walk import walk_following_links

_PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SOUND_ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4")


@dataclass(frozen=True)
class PlainFiles(BlockFormat):
    """Objects, such as images, each of which is one sample. Its field is named by the extension; `__key__` is the URL without it.

    `recognize` and `describe` accept pictures only: a single one, or a folder of them with a subfolder for each class.
    """

    name: ClassVar[str] = "files"
    title: ClassVar[str] = "images"
    endings: ClassVar[tuple[str, ...]] = (*_PICTURE_ENDINGS, *_SOUND_ENDINGS)

    def recognize(self, head: Head) -> bool:
        if head.compression:
            return False
        if head.is_folder:
            return next(_pictures_below(head.path), None) is not None
        # BMP's magic has only two bytes, which other files may begin with, too; it is accepted within a folder of pictures
        return head.begin[:2] != b"BM" and picture_format(head.begin) is not None

    def known(self, url: str, nbytes: int) -> RecordIndex:
        return RecordIndex(url, np.array([0, nbytes], np.int64))

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        return self.known(url, nbytes)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        name = index.path.rsplit("/", 1)[-1]
        extension = name.rpartition(".")[2].lower() if "." in name else "data"
        return {"__key__": index.path.rpartition(".")[0] if "." in name else index.path, extension: bytes(data)}

    def describe(self, head: Head, num_samples: int) -> Summary:
        root = head.path if head.is_folder else head.path.parent
        found = list(_pictures_below(root)) if head.is_folder else [(head.path, picture_format(head.begin) or "")]
        paths = [path for path, _ in found]
        names = [path.relative_to(root) for path in paths]
        fields = {"image": "uint8 (any, any, 3)"}
        if classes := sorted({name.parts[0] for name in names if len(name.parts) > 1}):
            listed = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            fields["label"] = f"int64: {len(classes)} {'folder' if len(classes) == 1 else 'folders'}, {listed}"
        shapes = [_of_picture(path, lambda image: (*image.size, image.mode)) for path in paths[:SIZED]]
        widths, heights, modes = zip(*shapes, strict=True)
        notes = [
            ", ".join(f"{count:,} {kind}" for kind, count in Counter(kind for _, kind in found).most_common()),
            f"widths {min(widths)} to {max(widths)}, heights {min(heights)} to {max(heights)}, "
            + ", ".join(f"{mode} ({count:,})" for mode, count in Counter(modes).most_common())
            + (f", of the first {SIZED:,}" if len(paths) > SIZED else ""),
        ]
        nbytes = [path.stat().st_size for path in paths]
        samples = [
            {"name": str(name), "image": _of_picture(path, lambda image: np.asarray(image.convert("RGB")))}
            for name, path in zip(names, paths[:num_samples], strict=False)
        ]
        return Summary(str(head.path), self.title, sum(nbytes), len(paths), fields, Sizes.of(nbytes), samples, notes)


_PICTURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}


def picture_format(begin: bytes) -> str | None:
    """Return the picture format that these first bytes indicate, or None."""
    if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP":
        return "WebP"
    return next((kind for magic, kind in _PICTURES.items() if begin.startswith(magic)), None)


def _pictures_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, format) of the pictures below a folder, in the order of their names. Hidden files are ignored."""
    for place, folders, names in walk_following_links(str(folder)):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            if is_hidden(str(path.relative_to(folder))):
                continue
            with open(path, "rb") as file:
                kind = picture_format(file.read(16))
            if kind is not None:
                yield path, kind


def _of_picture(path: Path, what: Callable[[Any], Any]) -> Any:
    """Open a picture and return `what(picture)`. Size and mode are in the header, so asking for them decodes no pixels."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return what(image)
    except Exception as error:  # Pillow's many decoders raise errors of many types
        raise ValueError(f"{path}: the picture is damaged: {error}") from error
