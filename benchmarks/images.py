"""Measure the CPU time of decoding JPEG photographs of 95 kB to random crops of 224, and what the loader adds to the decoder.

Method: The photographs that ship with the package, rotated and mirrored, at the quality that makes each 95 kB; 2,048 samples in
the page cache; RandomResizedCrop(224), flip, uint8, channels first; batches of 64; 2 forked workers. The cases take turns in
fresh processes:

    shmload                        an ImageFolder
    shmload with restart markers   the same files, re-encoded with restart markers (with_restart_markers)
    shmload by simplejpeg          the first files; simplejpeg decodes whole images
    torch                          torch's DataLoader; simplejpeg decodes whole images with its fast DCT, and OpenCV crops (without
                                   antialiasing)
    threads                        the same in a pool of threads in the trainer
    torch and Pillow               torch's DataLoader with Pillow, as torchvision does it
    torch and ImageFolder          torch's DataLoader over shmload's ImageFolder, sample by sample, i.e. with shmload's decoder

How to read: The figures are CPU microseconds per image over all processes. `one core` is simplejpeg alone, decoding into
existing memory in this process: no loader that decodes whole images at full size can cost less.

Predicted, when shmload began to decode only what a crop needs: Entropy decoding, two thirds of the work, is skipped only below
the crop, and the rest everywhere outside of the crop. This costs 0.82 of the CPU of decoding whole images, so 1,020 us where
that costs 1,250, and gives 1.3 to 1.4x torch. Predicted, when restart markers were added: Random crops need 0.6 of the bits of
all rows down to their last one, and everything else is unchanged. This costs 0.79 of the CPU without markers, 950 us where that
is 1,200, and makes files 0.98 to 0.99 as large.

Result (2 cores, 2 workers), CPU us per image: shmload 1,040, by simplejpeg 1,240, torch 1,493, torch with Pillow 2,538, torch
and ImageFolder 1,271; simplejpeg alone on one core 1,249. Images/s are 1.46x torch's. At load 15 from other work (4 rounds),
shmload cost 0.73 to 0.86 of decoding whole images, 0.51 to 0.64 of torch, and 0.69 to 0.76 of torch and ImageFolder. In one
process, decoding alone takes 1,170 us for a whole image, 818 to read the bits without using them, and 597 for the upper half.

Result of restart markers: 0.77 of the CPU at load 12 (3 rounds: 975 us, 1,270 without, 1,550 threads, 1,857 torch), and files
0.961 as large. With 64 pixels between two markers, at load 2 to 5, 0.79 (873 and 1,100 us, 1,346 threads, 1,571 torch). In one
process, decoding and resampling alone: 0.79, and 0.94 with one marker per row.
"""

import importlib
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common import THREADS, Result, Row, Settings, forked, in_turn, main, plain
from shmload.formats import ImageDecoder, ImageFolder, RandomResizedCrop, with_restart_markers
from shmload.tools.bench.photos import photo_files

NBYTES, SIDE, NUM_SAMPLES = 95_000, 224, 2048
CROP = RandomResizedCrop(SIDE)


@contextmanager
def photographs() -> Iterator[list[str]]:
    """Writes the files and yields their paths."""
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        found = []
        for number, path in enumerate(photo_files()):
            with Image.open(path) as opened:
                photo = opened.convert("RGB")
            for turn in (None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180):
                file = Path(folder) / f"{number}-{turn}.jpg"
                file.write_bytes(encoded(photo if turn is None else photo.transpose(turn)))
                found.append(str(file))
        yield found


def encoded(photo: Any) -> bytes:
    """Returns a JPEG of about NBYTES."""
    sizes = {}
    for quality in range(100, 70, -1):
        file = io.BytesIO()
        photo.save(file, "JPEG", quality=quality)
        sizes[abs(len(file.getvalue()) - NBYTES)] = file.getvalue()
    return sizes[min(sizes)]


def with_markers(paths: Sequence[str]) -> list[str]:
    """Writes a copy of each file with restart markers next to it, and returns the paths. Exits if that changes a pixel."""
    from PIL import Image

    found = []
    for path in map(Path, paths):
        data = path.read_bytes()
        anew = with_restart_markers(data)
        before, after = (np.asarray(Image.open(io.BytesIO(each))) for each in (data, anew))
        if anew == data or not np.array_equal(before, after):
            raise SystemExit(f"{path}: not the same picture, or the same file")
        file = path.with_suffix(".anew.jpg")
        file.write_bytes(anew)
        found.append(str(file))
    return found


def in_place(paths: Sequence[str], decoder: Literal["auto", "simplejpeg"] = "auto") -> ImageFolder:
    listed = [paths[n % len(paths)] for n in range(NUM_SAMPLES)]
    return ImageFolder(listed, ImageDecoder(CROP, flip=0.5, fast=True, decoder=decoder), labels=range(NUM_SAMPLES))


class ByHand:
    """A dataset as users write it, which decodes and crops with other libraries."""

    def __init__(self, paths: Sequence[str], library: str) -> None:
        self.paths, self.library = list(paths), library
        for name in ("PIL.Image",) if library == "pillow" else ("cv2", "simplejpeg"):
            importlib.import_module(name)  # before workers fork, so that they do not import it again

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index % len(self.paths)]
        rng = np.random.default_rng(random.getrandbits(64))
        crop = self._pillow(path, rng) if self.library == "pillow" else self._opencv(path, rng)
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        return {"image": np.ascontiguousarray(crop.transpose(2, 0, 1)), "label": index}

    def _pillow(self, path: str, rng: np.random.Generator) -> Any:
        from PIL import Image

        with Image.open(path) as opened:
            photo = opened.convert("RGB")
        top, left, bottom, right = CROP.window(photo.height, photo.width, rng).clip
        return np.asarray(photo.crop((left, top, right, bottom)).resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    def _opencv(self, path: str, rng: np.random.Generator) -> Any:
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)
        photo = simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB", fastdct=True, fastupsample=True)
        top, left, bottom, right = CROP.window(*photo.shape[:2], rng).clip
        return cv2.resize(photo[top:bottom, left:right], (SIDE, SIDE))


def decoding_alone(paths: Sequence[str]) -> float:
    """Returns the CPU microseconds that simplejpeg needs per file."""
    import simplejpeg

    memory = np.empty(500 * 500 * 3, np.uint8)
    costs = []
    for _ in range(5):
        for path in paths:
            data = Path(path).read_bytes()
            begin = time.thread_time()
            simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True, buffer=memory)
            costs.append(1e6 * (time.thread_time() - begin))
    return statistics.median(costs)


def measure(settings: Settings) -> Result:
    """Measures all cases."""
    with photographs() as paths:
        anew = with_markers(paths)
        size = sum(map(os.path.getsize, anew)) / sum(map(os.path.getsize, paths))
        cases: dict[str, tuple[str, str, dict[str, Any]]] = {
            "shmload": ("shmload", "in_place", {}),
            "shmload with restart markers": ("shmload", "in_place", {"paths": anew}),
            "shmload by simplejpeg": ("shmload", "in_place", {"decoder": "simplejpeg"}),
            "torch": ("torch", "ByHand", {"library": "opencv"}),
            "threads": (THREADS, "ByHand", {"library": "opencv"}),
            "torch and Pillow": ("torch", "ByHand", {"library": "pillow"}),
            "torch and ImageFolder": ("torch", "in_place", {}),
        }
        found = in_turn(
            {
                name: forked(
                    settings,
                    workload="images",
                    dataset=f"benchmarks.images:{dataset}",
                    arguments={"paths": paths, **arguments},
                    loader=loader,
                    batch_size=64,
                )
                for name, (loader, dataset, arguments) in cases.items()
            },
            settings,
        )
        core = decoding_alone(paths)
    cost = {name: each["cpu_us_per_sample"].median for name, each in found.items()}
    rate = {name: each["samples_per_s"].median for name, each in found.items()}
    ours, marked, torchs = cost["shmload"], cost["shmload with restart markers"], rate["shmload"] / rate["torch"]
    beside = ", ".join(f"{name} {value:.0f}" for name, value in cost.items() if name != "shmload")
    rows = [
        Row("JPEG of 95 kB to 224: CPU an image", ours, "us", f"{beside}; one core {core:.0f}", "<= 1,200", ours <= 1200),
        Row(
            "JPEG of 95 kB to 224: CPU with restart markers over without",
            marked / ours,
            "x",
            f"{marked:.0f} us; file size {size:.3f}x; over threads {marked / cost['threads']:.2f}x",
            "<= 0.79x",
            marked / ours <= 950 / 1200,
        ),
        Row(
            "JPEG of 95 kB to 224: images/s over torch's with the same decoder",
            torchs,
            "x",
            f"over Pillow {rate['shmload'] / rate['torch and Pillow']:.2f}x",
            ">= 1.3x",
            torchs >= 1.3,
        ),
    ]
    return Result(rows, {"cases": plain(found), "decoding_us": core})


if __name__ == "__main__":
    main("images", __doc__, measure)
