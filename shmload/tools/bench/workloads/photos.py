"""Photographs: decode, random resized crop to 224, random flip. uint8, channels first.

Eight free photographs of about 500x375 ship with the package (data/LICENCES); `--images FOLDER` takes the user's own.
An epoch goes over them many times, with another crop and flip for every index.
"""

import functools
import importlib.util
import math
import random
import shutil
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workloads.workload import Field, Workload
from shmload.tools.named import BenchError

SIDE = 224
NUM_SAMPLES = 4096
NUM_LABELS = 1000
NUM_COLD = 1024  # files of a cold pass
SUFFIXES = (".jpg", ".jpeg", ".png")
OWN_PHOTOS = Path(__file__).resolve().parents[3] / "data"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def codecs() -> tuple[Any, Any]:
    """simplejpeg and OpenCV, loaded on first use; OpenCV's own threads would fight with the workers."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    return simplejpeg, cv2


class Photos:
    """A map-style dataset of photos that also decodes in place.

    Args:
        files: paths of JPEG or PNG photos; sample `index` shows photo `index % len(files)`.
        num_samples: length of an epoch.
    """

    schema: dict[str, Field] = {"image": ("uint8", (3, SIDE, SIDE)), "label": ("int64", ())}  # noqa: RUF012  # never changed

    def __init__(self, files: Sequence[str], num_samples: int = NUM_SAMPLES) -> None:
        self.files, self.num_samples = list(files), num_samples
        codecs()  # before workers fork, so that none imports them again

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.empty((3, SIDE, SIDE), np.uint8)
        self.decode(index, image)
        return {"image": image, "label": index % NUM_LABELS}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        self.decode(index, out["image"])
        out["label"] = index % NUM_LABELS

    def decode(self, index: int, out: Pixels) -> None:
        """Fills `out` (3, 224, 224) with the crop that belongs to `index`."""
        crop_into(out, decode_file(self.files[index % len(self.files)]), index)

    def stored(self, index: int) -> tuple[bytes, int]:
        """What a peer keeps of a sample."""
        return Path(self.files[index % len(self.files)]).read_bytes(), index

    @staticmethod
    def decoded(payload: bytes, number: int) -> dict[str, Any]:
        """The sample of what was stored."""
        image = np.empty((3, SIDE, SIDE), np.uint8)
        crop_into(image, decode_bytes(payload, "stored photo"), number)
        return {"image": image, "label": number % NUM_LABELS}


def crop_into(out: Pixels, photo: Pixels, index: int) -> None:
    """Fills `out` (3, 224, 224) with the crop of `photo` (height, width, 3) that belongs to `index`."""
    cv2 = codecs()[1]
    draw = random.Random(int(index))
    top, left, height, width = crop_box(photo.shape[0], photo.shape[1], draw)
    crop = cv2.resize(photo[top : top + height, left : left + width], (SIDE, SIDE))
    if draw.random() < 0.5:
        crop = cv2.flip(crop, 1)
    np.copyto(out, crop.transpose(2, 0, 1))


def decode_file(path: str) -> Pixels:
    """RGB pixels of a JPEG or of anything else OpenCV reads. Shape (height, width, 3)."""
    return decode_bytes(Path(path).read_bytes(), path)


def decode_bytes(data: bytes, path: str) -> Pixels:
    simplejpeg, cv2 = codecs()
    try:
        if simplejpeg.is_jpeg(data):
            decoded: Pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
            return decoded
        found: Pixels | None = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    except (ValueError, cv2.error) as error:
        raise ValueError(f"{path}: not a photo that can be decoded: {error}") from error
    if found is None:
        raise ValueError(f"{path}: not a photo that can be decoded; needs JPEG or PNG, given {len(data)} bytes")
    return found


def crop_box(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Top, left, height, width of a crop of 8 to 100 % of the area and a ratio of 3/4 to 4/3.

    Source: RandomResizedCrop of torchvision.transforms, after C. Szegedy et al., Going deeper with convolutions, 2015.
    """
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            return draw.randint(0, height - crop_height), draw.randint(0, width - crop_width), crop_height, crop_width
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def photo_files(folder: Path) -> list[str]:
    """Photos of a folder and those below it, sorted.

    Raises:
        BenchError: there is no such folder, or no photo in it.
    """
    if not folder.is_dir():
        raise BenchError(f"--images: needs a folder with photos, given {str(folder)!r}, which is not a folder")
    files = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise BenchError(f"--images: needs at least one of {', '.join(SUFFIXES)}, found none in {str(folder)!r}")
    return files


def prepare(folder: Path, small: bool) -> dict[str, Any]:
    return {"files": photo_files(OWN_PHOTOS), "num_samples": 512 if small else NUM_SAMPLES}


def on_disk(arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The user's photos once each; the few that ship as so many copies, for eight files would be warm at once."""
    files = arguments["files"]
    if len(files) < NUM_COLD and Path(files[0]).parent == OWN_PHOTOS:
        small = arguments["num_samples"] < NUM_SAMPLES
        copies = folder / "photos"
        copies.mkdir()
        for number in range(NUM_COLD // (8 if small else 1)):
            shutil.copyfile(files[number % len(files)], copies / f"{number:05d}.jpg")
        files = photo_files(copies)
    return {"files": files, "num_samples": len(files)}, files


def missing() -> str | None:
    absent = [name for name in ("simplejpeg", "cv2") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)}: pip install 'shmload[images]'" if absent else None


PHOTOS = Workload(
    name="photos",
    title="JPEG photos of 500x375, decoded, cropped to 224 and flipped",
    dataset=f"{__name__}:Photos",
    batch_size=64,
    unit="photos",
    meaning="decoding is most of the work here, and both loaders decode alike",
    prepare=prepare,
    num_with_peers=2048,
    on_disk=on_disk,
    missing=missing,
)
