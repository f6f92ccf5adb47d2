"""Measure the cost per sample of packing a dataset into shards, compared with webdataset's ShardWriter and MosaicML's MDSWriter.

Method: 8,000 JPEG files (the package's photographs, 69 kB on average) and 200 images of 224 x 224 that are arrays are packed
into shards of 20 MB. shmload packs with 2 workers; "one process" is shmload without workers. webdataset is used as its users
do: a loop over a permutation reads each file and passes bytes or an array to ShardWriter. Both store arrays as PNG, with
Pillow's encoder at zlib's level 6. The shards are discarded: by a store that drops bytes, and in webdataset's `post` hook with
os.unlink.

Then the photographs are packed again, to a folder as a store. Both use the same put_file, which syncs each shard to the disk.
MDSWriter, with columns jpg and cls, writes to the folder by itself and leaves its shards in the page cache. It takes part if
SHMLOAD_OTHER_LOADERS names a folder that contains it (.ci/run makes one). Each case runs in a fresh process, in turn. CPU is
that of the process and all its children, including the start and end of the workers.

How to read: "Per core" compares the CPU per sample. With arrays, the CPU is that of the PNG encoder, which is the same for
both, so only the time differs. It is similar with a folder, where most of the CPU is the kernel's, for syncing new files to the
disk.

Predicted: photos 2.5x per core, because tarfile takes 35 us per member and so 70 of about 170 us, whereas a header takes
shmload 3; arrays 1.0x per core, and 1.8x in time with 2 workers.

Result (2 cores with a load of 9 from other work, so times mean little; 3 rounds): CPU per photo 104 us, webdataset 241: 2.3x
(an earlier version with half as many photos, in which the workers' start weighs twice as much: 112 and 195). Per array 16.0 ms,
webdataset 14.5: 0.91x. To a folder 235 us and 420: 1.8x, because syncing a file to the disk takes about 130 us in both. In time
6.3x, 1.1x and 2.4x.

Result with MDSWriter (2 cores, a load below 1, 4,000 photos, 1 round; mosaicml-streaming 0.13.0): to a folder 123 us per photo
with 2 workers, 120 in one process, webdataset 262, MDSWriter 529; to the store that drops bytes 65, 88 and 204. Per core 1.9x
to that store, because the workers' start weighs twice as much, and 1.75x to a folder. While the disk was busy, to a folder: 669
with 2 workers, 308 in one process, 868 with MDSWriter.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import Result, Row, Settings, main
from shmload.errors import ObjectMissing
from shmload.remote.packing.dataset_packing import DatasetPacking
from shmload.remote.packing.pack_options import PackOptions
from shmload.schedule.permutation import Permutation
from shmload.storage.local_store import LocalStore
from shmload.storage.store import StoredObject
from shmload.tools.bench.photos import OWN_PHOTOS

NUM_PHOTOS, NUM_ARRAYS, MAXSIZE, MAXCOUNT, SEED = 8000, 200, 20_000_000, 100_000, 7


class Arrays:
    """Parts of the photographs, decoded in advance."""

    def __init__(self) -> None:
        wholes = [np.array(Image.open(path).convert("RGB").resize((448, 336))) for path in sorted(OWN_PHOTOS.glob("*.jpg"))]
        rng = np.random.default_rng(SEED)
        self._parts = [
            np.ascontiguousarray(wholes[n % len(wholes)][y : y + 224, x : x + 224])
            for n, y, x in zip(range(NUM_ARRAYS), rng.integers(0, 112, NUM_ARRAYS), rng.integers(0, 224, NUM_ARRAYS), strict=True)
        ]

    def __len__(self) -> int:
        return NUM_ARRAYS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._parts[index], index


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Yields a folder with photographs, with one folder per class, and an empty folder."""
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as root:
        photos = sorted(OWN_PHOTOS.glob("*.jpg"))
        for number in range(NUM_PHOTOS):
            path = Path(root, "photos", f"class-{number % 10}", f"{number:06d}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photos[number % len(photos)], path)
        yield Path(root, "photos"), Path(root, "packed")


class Forgetful:
    """A store that keeps small objects, and only the sizes of shards."""

    url = "nowhere"

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}

    def get(self, key: str, *, etag: str | None = None) -> bytes:
        if key not in self._kept:
            raise ObjectMissing(key)
        return self._kept[key]

    def put(self, key: str, data: Any) -> StoredObject:
        self._kept[key] = bytes(data)
        return self._put(key, len(data))

    def put_file(self, key: str, path: Path) -> StoredObject:
        return self._put(key, path.stat().st_size)

    def _put(self, key: str, nbytes: int) -> StoredObject:
        self._sizes[key] = nbytes
        return StoredObject(key, nbytes, "")

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return (StoredObject(key, nbytes, "") for key, nbytes in sorted(self._sizes.items()) if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sizes.pop(key, None)


def by_shmload(dataset: Any, store: Any, workers: int = 2) -> None:
    options = PackOptions(MAXSIZE, MAXCOUNT, workers, SEED, multiprocessing_context="fork")
    DatasetPacking(dataset, store, options, None).run()


def by_shmload_alone(dataset: Any, store: Any) -> None:
    by_shmload(dataset, store, workers=0)


def in_order(dataset: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and fields of each sample in random order, as users of the other libraries write it."""
    entries = getattr(dataset, "samples", None)
    order = Permutation(len(dataset), seed=SEED)
    for index in order.take(0, len(order)).tolist():
        if entries is not None:
            path, label = entries[index]
            yield index, {"jpg": Path(path).read_bytes(), "cls": label}
        else:
            image, label = dataset[index]
            yield index, {"png": image, "cls": label}


def by_streaming(dataset: Any, store: Any) -> None:
    from tests.remote.write_foreign import Stub

    sys.path.append(os.environ[FOLDER])
    sys.meta_path.append(Stub())
    from streaming import MDSWriter

    with MDSWriter(out=str(store.root), columns={"jpg": "bytes", "cls": "int"}, size_limit=MAXSIZE) as writer:
        for _, fields in in_order(dataset):
            writer.write(fields)


def by_webdataset(dataset: Any, store: Any) -> None:
    import webdataset

    def send(name: str) -> None:
        store.put_file(os.path.basename(name), Path(name))
        os.unlink(name)

    with (
        tempfile.TemporaryDirectory() as spool,
        webdataset.ShardWriter(f"{spool}/%06d.tar", maxcount=MAXCOUNT, maxsize=MAXSIZE, post=send, verbose=0) as writer,
    ):
        for index, fields in in_order(dataset):
            writer.write({"__key__": f"{index:08d}", **fields})


CASES = (("photos", NUM_PHOTOS, 2.0), ("arrays", NUM_ARRAYS, 0.8), ("photos to a folder", NUM_PHOTOS, 1.0))
WAYS = {"shmload": by_shmload, "shmload alone": by_shmload_alone, "webdataset": by_webdataset, "streaming": by_streaming}
TO_A_FOLDER = CASES[-1][0]
FOLDER = "SHMLOAD_OTHER_LOADERS"


def ways_of(what: str) -> list[str]:
    """Returns the libraries that pack this kind of data."""
    return [way for way in WAYS if way != "streaming" or (what == TO_A_FOLDER and FOLDER in os.environ)]


def one(way: str, what: str, photos: Path, out: Path) -> tuple[float, float]:
    """Returns (CPU seconds, seconds) of one packing; runs in a fresh process."""
    import torch  # noqa: F401  # both need it, so its import is not measured

    from shmload.formats import ImageFolder

    dataset: Any = Arrays() if what == "arrays" else ImageFolder(photos)
    store: Any = LocalStore(out) if what == TO_A_FOLDER else Forgetful()
    begin, before = time.perf_counter(), os.times()
    WAYS[way](dataset, store)
    after, end = os.times(), time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    return sum(after[:4]) - sum(before[:4]), end - begin


def measure(settings: Settings) -> Result:
    """Measures all packers on both kinds of images."""
    rows, told = [], {}
    with folders() as (photos, out):
        nbytes = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
        for what, count, aim in CASES:
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways_of(what)}
            for _ in range(settings.rounds):
                for way in found:
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        found[way].append(pool.apply(_of_pool, ((way, what, photos, out),)))
            cpu = {way: median(us for us, _ in each) / count * 1e6 for way, each in found.items()}
            took = {way: median(us for _, us in each) / count * 1e6 for way, each in found.items()}
            told[what] = {"cpu_us": cpu, "us": took}
            per_core = cpu["webdataset"] / cpu["shmload"]
            beside = f"{cpu['shmload']:.0f} us, webdataset {cpu['webdataset']:.0f}"
            if what != "arrays":
                rate = {way: nbytes / count / us for way, us in took.items()}
                beside += f"; MB/s {rate['shmload']:.0f}, webdataset {rate['webdataset']:.0f}"
            rows.append(Row(f"packing {what}, per core", per_core, "x", beside, f">= {aim}x", per_core >= aim))
            for way, number, aim in (("shmload", "2 workers", 2.0), ("shmload alone", "one process", 1.0)):
                for other in (each for each in found if not each.startswith("shmload")):
                    faster = took[other] / took[way]
                    beside = f"{took[way]:.0f} us, {other} {took[other]:.0f}"
                    name = f"packing {what}, in time, {number}" + (f", {other}" if other != "webdataset" else "")
                    is_asked = what != "arrays"  # for arrays, the encoder's time is the same
                    rows.append(Row(name, faster, "x", beside, f">= {aim}x" if is_asked else "", not is_asked or faster >= aim))
    return Result(rows, told)


def _of_pool(arguments: tuple[Any, ...]) -> tuple[float, float]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that it may start workers
    return one(*arguments)


if __name__ == "__main__":
    main("packing", __doc__, measure)
