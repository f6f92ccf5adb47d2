"""The built-in workloads: five datasets, and one table of them.

A workload names its dataset as `module:class`, like a user's own, and prepares its arguments once in the parent: files that are
written on the fly lie in a temporary folder. Contents are photographs or random numbers, never zeros, which some memory systems
deliver faster. Every draw is keyed by the sample's index, so that two loaders must deliver the same bytes.
"""

import functools
import importlib.util
import math
import random
import shutil
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Field = tuple[str, tuple[int, ...]]  # dtype, shape of one sample
Prepared = tuple[dict[str, Any], list[str]]  # a dataset's arguments, and the files it reads
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A dataset and the batch size it is delivered in.

    Args:
        prepare: called once with a temporary folder, whether a small set will do, and whether there will be a cold pass: then
            every sample of an epoch lies at a place of its own in the files that are named. No files: the data lie in memory.
        missing: the pip command for what is not installed, None if all is there.
        meaning: what the ratio of two loaders says here; ends a sentence of the report.
    """

    name: str
    title: str
    dataset: str
    batch_size: int | None
    unit: str
    meaning: str
    prepare: Callable[[Path, bool, bool], Prepared]
    missing: Callable[[], str | None] = lambda: None


SIDE = 224
NUM_PHOTOS = 4096
NUM_LABELS = 1000
NUM_COLD = 1024  # files of a cold pass
OWN_PHOTOS = Path(__file__).resolve().parents[2] / "data"


@functools.cache
def codecs() -> tuple[Any, Any]:
    """simplejpeg and OpenCV, loaded on first use; OpenCV's own threads would fight with the workers."""
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
        crop_into(out, Path(self.files[index % len(self.files)]).read_bytes(), index)


def crop_into(out: Pixels, jpeg: bytes, index: int) -> None:
    """Fills `out` (3, 224, 224) with the crop of a photo that belongs to `index`."""
    simplejpeg, cv2 = codecs()
    photo = simplejpeg.decode_jpeg(jpeg, "RGB", fastdct=True, fastupsample=True)
    draw = random.Random(int(index))
    top, left, height, width = crop_box(photo.shape[0], photo.shape[1], draw)
    crop = cv2.resize(photo[top : top + height, left : left + width], (SIDE, SIDE))
    if draw.random() < 0.5:
        crop = cv2.flip(crop, 1)
    np.copyto(out, crop.transpose(2, 0, 1))


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


def photo_files(folder: Path = OWN_PHOTOS) -> list[str]:
    """The photos of a folder; by default the eight free ones of about 500x375 that ship with the package (data/LICENCES)."""
    return sorted(map(str, folder.glob("*.jpg")))


def prepare_photos(folder: Path, small: bool, cold: bool) -> Prepared:
    """For a cold pass many copies of the few photos, once each: eight files would be warm at once."""
    files = photo_files()
    if not cold:
        return {"files": files, "num_samples": NUM_PHOTOS // (8 if small else 1)}, files
    for number in range(NUM_COLD // (8 if small else 1)):
        shutil.copyfile(files[number % len(files)], folder / f"{number:05d}.jpg")
    copies = photo_files(folder)
    return {"files": copies, "num_samples": len(copies)}, copies


def missing_codecs() -> str | None:
    absent = [name for name in ("simplejpeg", "cv2") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)}: pip install 'shmload[images]'" if absent else None


RECORD_LENGTH = 1 << 18  # float32 values of a record: 1 MiB
NUM_RECORDS = 256


class Records:
    """Raw float32 records of 1 MiB in a mapped file, as scientific data often lies; they come again and again."""

    schema: dict[str, Field] = {"x": ("float32", (RECORD_LENGTH,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str, num_samples: int) -> None:
        self.path, self.num_samples = path, num_samples
        # Copy on write: rows are writable arrays, as torch's collate wants them, and nobody writes.
        self.records = np.asarray(np.memmap(path, np.float32, mode="c")).reshape(-1, RECORD_LENGTH)

    def __reduce__(self) -> tuple[type["Records"], tuple[str, int]]:
        return Records, (self.path, self.num_samples)  # a pickled map would carry the file's contents

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.records[index % len(self.records)]}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        np.copyto(out["x"], self.records[index % len(self.records)])


def prepare_records(folder: Path, small: bool, cold: bool) -> Prepared:
    path, count = folder / "records.bin", NUM_RECORDS // (16 if small else 1)
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(draw.random(RECORD_LENGTH, np.float32).data)
    return {"path": str(path), "num_samples": count if cold else 16 * count}, [str(path)]


ROW_LENGTH = 64


class Rows:
    """Tiny rows, 64 float32 and a label, out of an array in memory; reads a whole batch at once."""

    schema: dict[str, Field] = {"x": ("float32", (ROW_LENGTH,)), "label": ("int64", ())}  # noqa: RUF012  # never changed

    def __init__(self, num_samples: int) -> None:
        draw = np.random.default_rng(2)
        self.x = draw.random((num_samples, ROW_LENGTH), np.float32)
        self.labels = draw.integers(0, NUM_LABELS, num_samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "label": self.labels[index]}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        # numpy's default mode checks and buffers; "clip" writes straight into `out` in half the time
        np.take(self.x, indices, 0, out=out["x"], mode="clip")
        np.take(self.labels, indices, 0, out=out["label"], mode="clip")


WINDOW = 1025  # inputs and, shifted by one, targets of 1,024
STRIDE = WINDOW - 1
NUM_WINDOWS = 48 * 1024


class Tokens:
    """Language-model windows of uint16 tokens in a mapped file, delivered as int64; neighbours share one token."""

    schema: dict[str, Field] = {"tokens": ("int64", (WINDOW,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))

    def __reduce__(self) -> tuple[type["Tokens"], tuple[str]]:
        return Tokens, (self.path,)  # a pickled map would carry the file's contents

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // STRIDE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.tokens[index * STRIDE : index * STRIDE + WINDOW].astype(np.int64)}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        for row, index in zip(out["tokens"], indices, strict=True):
            row[...] = self.tokens[index * STRIDE : index * STRIDE + WINDOW]


def prepare_tokens(folder: Path, small: bool, cold: bool) -> Prepared:
    path = folder / "tokens.bin"
    count = NUM_WINDOWS // (16 if small else 1) * STRIDE + 1
    path.write_bytes(np.random.default_rng(3).integers(0, 50_257, count, np.uint16).data)
    return {"path": str(path)}, [str(path)]


SHAPE = (3, 224, 224)


class Plain:
    """(uint8 image, int label) out of memory; knows nothing of any loader, as a user's own dataset does not."""

    def __init__(self, num_images: int = 256, num_samples: int = 8192) -> None:
        self.images = np.random.default_rng(4).integers(0, 256, (num_images, *SHAPE), np.uint8)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index % len(self.images)], index


WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            name="photos",
            title="JPEG photos of 500x375, decoded, cropped to 224 and flipped",
            dataset=f"{__name__}:Photos",
            batch_size=64,
            unit="photos",
            meaning="decoding is most of the work here, and both loaders decode alike",
            prepare=prepare_photos,
            missing=missing_codecs,
        ),
        Workload(
            name="records",
            title="raw float32 records of 1 MiB from a file in the page cache",
            dataset=f"{__name__}:Records",
            batch_size=16,
            unit="records",
            meaning="there is nothing to decode, so this is how fast bytes get from a file to the trainer",
            prepare=prepare_records,
        ),
        Workload(
            name="rows",
            title="rows of 64 float32 and a label from memory, shuffled",
            dataset=f"{__name__}:Rows",
            batch_size=1024,
            unit="rows",
            meaning="a row costs next to nothing to fetch, so this is what a loader adds to every sample",
            prepare=lambda folder, small, cold: ({"num_samples": (48 if small else 480) * 1024}, []),
        ),
        Workload(
            name="tokens",
            title="windows of 1,025 uint16 tokens of a mapped file, as int64",
            dataset=f"{__name__}:Tokens",
            batch_size=32,
            unit="windows",
            meaning="batches are small here, so this is mostly what a loader costs per batch",
            prepare=prepare_tokens,
        ),
        Workload(
            name="python",
            title="a plain Python dataset of (uint8 3x224x224, int)",
            dataset=f"{__name__}:Plain",
            batch_size=64,
            unit="samples",
            meaning="the dataset is cheap and plain, so this is what changing one line brings",
            prepare=lambda folder, small, cold: ({"num_images": 32, "num_samples": 1024} if small else {}, []),
        ),
    )
}
