"""The built-in dataset of JPEG photos.

Every draw is keyed by the sample's index, so that two loaders must deliver the same bytes.
"""

import functools
import importlib.util
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.formats.images.crops import RandomResizedCrop
from shmload.tools.bench.workload import NUM_LABELS, Field

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
SIDE = 224
NUM_PHOTOS = 4096
OWN_PHOTOS = Path(__file__).resolve().parents[2] / "data"


@functools.cache
def codecs() -> tuple[Any, Any]:
    """Return simplejpeg and OpenCV, loaded on first use; OpenCV's own threads would compete with the workers."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    return simplejpeg, cv2


class Photos:
    """JPEG photos: decode, random resized crop to 224, random flip. uint8, channels first. It also decodes in place.

    Args:
        files: paths of the photos; sample `index` shows photo `index % len(files)`, with a crop and flip of its own.
        num_samples: length of an epoch.
    """

    schema: dict[str, Field] = {"image": ("uint8", (3, SIDE, SIDE)), "label": ("int64", ())}  # noqa: RUF012  # never changed

    def __init__(self, files: Sequence[str], num_samples: int = NUM_PHOTOS) -> None:
        self.files, self.num_samples = list(files), num_samples
        codecs()  # before workers fork, so that they do not import them again

    def __len__(self) -> int:
        return self.num_samples

    def jpeg(self, index: int) -> bytes:
        return Path(self.files[index % len(self.files)]).read_bytes()

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.empty((3, SIDE, SIDE), np.uint8)
        crop_into(image, self.jpeg(index), index)
        return {"image": image, "label": index % NUM_LABELS}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        crop_into(out["image"], self.jpeg(index), index)
        out["label"] = index % NUM_LABELS


def crop_into(out: Pixels, jpeg: bytes, index: int) -> None:
    """Fill `out` (3, 224, 224) with the crop of a photo that belongs to `index`."""
    simplejpeg, cv2 = codecs()
    photo = simplejpeg.decode_jpeg(jpeg, "RGB", fastdct=True, fastupsample=True)
    draw = np.random.default_rng(int(index))
    top, left, bottom, right = RandomResizedCrop(SIDE).window(photo.shape[0], photo.shape[1], draw).clip
    crop = cv2.resize(photo[top:bottom, left:right], (SIDE, SIDE))
    if draw.random() < 0.5:
        crop = cv2.flip(crop, 1)
    np.copyto(out, crop.transpose(2, 0, 1))


def photo_files(folder: Path = OWN_PHOTOS) -> list[str]:
    """Return the photos of a folder; by default the eight free ones of about 500x375 in the package (data/LICENCES)."""
    return sorted(map(str, folder.glob("*.jpg")))


def prepare_photos(folder: Path, small: bool) -> dict[str, Any]:
    return {"files": photo_files(), "num_samples": NUM_PHOTOS // (8 if small else 1)}


def missing_codecs() -> str | None:
    absent = [name for name in ("simplejpeg", "cv2") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)}: pip install 'shmload[images]'" if absent else None
