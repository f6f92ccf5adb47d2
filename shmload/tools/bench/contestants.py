"""The loaders that are compared, and the built-in workloads that they read.

A contestant is a name and a function that makes an iterable of batches, from a dataset or from the user's own DataLoader. All
shuffle from the same seed in torch's way, so that batches can be compared byte by byte. `module:factory` names a loader outside
the table: the factory takes the dataset and a LoaderOptions. A factory with `keeps_order = False` delivers in an order of its
own, and its bytes are not compared.

A user's torch DataLoader keeps every argument as a public attribute, and its order as a sampler or a batch sampler. A ShmLoader
gets the same objects, so both draw the same order from the same generator. `torch` is the user's object itself, unless a sweep
asks for another number of workers or prefetch factor: then it is rebuilt in the same way.

A workload names its dataset as `module:class`, like a user's own, and prepares its arguments once in the parent: generated files
are in a temporary folder. Contents are photographs or random numbers, never zeros, which some memory systems deliver faster.
Every draw is keyed by the sample's index, so that two loaders must deliver the same bytes.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shmload.formats.images.crops import RandomResizedCrop
from shmload.loader import ShmLoader
from shmload.tools.object_reference import BenchError, one_line, resolve


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options that every contestant gets.

    Args:
        batch_size: samples of a batch.
        num_workers: worker processes; 0 reads in the trainer.
        seed: seed of the order.
        start_method: start method of the workers; None is Python's default.
        prefetch_factor: batches ordered ahead for each worker; None is torch's default.
        collate: list of samples -> batch; None is the loader's default.
        shuffle: False for an IterableDataset, which has its own order.
        scratch: an empty folder for this loader and dataset, kept until the benchmark ends: for files in a format of its own.
    """

    batch_size: int
    num_workers: int
    seed: int
    start_method: str | None = None
    prefetch_factor: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    scratch: Path | None = None
    shuffle: bool = True

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


Loader = Iterable[Any]
Factory = Callable[[Any, LoaderOptions], Loader]


def keywords(options: LoaderOptions) -> dict[str, Any]:
    """Return the arguments of a DataLoader, except those that set its order."""
    workers = options.num_workers
    return {
        "batch_size": options.batch_size,
        "shuffle": options.shuffle,
        "num_workers": workers,
        "collate_fn": options.collate,
        "multiprocessing_context": options.start_method if workers else None,
        "persistent_workers": workers > 0,
        "prefetch_factor": options.prefetch_factor if workers else None,
    }


def shmload(dataset: Any, options: LoaderOptions) -> Loader:
    """Return a ShmLoader in torch mode."""
    return ShmLoader(dataset, **keywords(options), generator=options.generator())


def seed_mode(dataset: Any, options: LoaderOptions) -> Loader:
    """Return a ShmLoader in seed mode, with its own order."""
    return ShmLoader(dataset, **keywords(options), seed=options.seed)


seed_mode.keeps_order = False  # type: ignore[attr-defined]  # a user's factory may set it, too


def torch_loader(dataset: Any, options: LoaderOptions) -> Loader:
    """Return torch's DataLoader, which reads sample by sample, as most people use it."""
    return DataLoader(dataset, **keywords(options), generator=options.generator())


CONTESTANTS: dict[str, Factory] = {"shmload": shmload, "torch": torch_loader, "shmload-seed": seed_mode}


def factory(name: str) -> Factory:
    """Return the factory of a contestant: from the table, or as `module:factory`."""
    found: Factory = resolve(name, what="--loader") if ":" in name else CONTESTANTS[name]
    return found


TAKEN = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def users_loader(spec: str, seed: int) -> DataLoader[Any]:
    """Return the DataLoader that `spec` names or returns. The global seed is set first, so every process has the same order.

    Raises:
        BenchError: it raised, or the result is not a DataLoader.
    """
    torch.manual_seed(seed)
    made = resolve(spec, what="--torch-loader")
    wanted = "a torch DataLoader or a function that returns one"
    if not isinstance(made, DataLoader) and callable(made):
        wanted = "a function that returns a torch DataLoader"
        try:
            made = made()
        except Exception as error:
            raise BenchError(
                f"--torch-loader {spec}: calling it without arguments raised {one_line(error)}; name a function that needs "
                "none and returns the DataLoader"
            ) from error
    if not isinstance(made, DataLoader):
        raise BenchError(f"--torch-loader {spec}: needs {wanted}, given {type(made).__name__}")
    return made


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the keywords that make a loader with the same batches in the same order."""
    found = {name: getattr(loader, name) for name in TAKEN if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        return {**found, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:  # each item of the sampler is read as it is
        return {**found, "batch_size": None, "sampler": loader.sampler}
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return {**found, "batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return {**found, "batch_sampler": loader.batch_sampler}


def like_users(name: str, own: DataLoader[Any], num_workers: int | None, prefetch: int | None) -> DataLoader[Any]:
    """Return a loader with the arguments of the user's: torch's for the name "torch", a ShmLoader for "shmload".

    Args:
        name: "torch" or "shmload".
        own: the user's loader, which is returned itself for "torch" if no setting is given.
        num_workers, prefetch: settings to use in place of its own; None keeps its own.
    """
    if name == "torch" and num_workers is None and prefetch is None:
        return own
    arguments = arguments_of(own)
    if num_workers is not None:
        arguments["num_workers"] = num_workers
    if prefetch is not None:
        arguments["prefetch_factor"] = prefetch
    if arguments["num_workers"] == 0:  # torch refuses these without workers
        arguments |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return (ShmLoader if name == "shmload" else DataLoader)(own.dataset, **arguments)


def num_samples(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of an epoch; None if it is unknown before they are read."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        count = len(loader.sampler)  # type: ignore[arg-type]  # one without a length raises TypeError
    except TypeError:
        return None
    return count // loader.batch_size * loader.batch_size if loader.drop_last else count


Field = tuple[str, tuple[int, ...]]  # dtype, shape of one sample
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def nothing_missing() -> None:
    """Return None, because the workload needs no extra package."""


@dataclass(frozen=True)
class Workload:
    """A dataset and its batch size.

    Args:
        name: its name on the command line and in reports.
        title: a description of its samples.
        dataset: `module:class` of the dataset.
        batch_size: samples of a batch; None if the user's own DataLoader sets it.
        prepare: called once with a temporary folder and whether a small set is enough; returns the dataset's arguments.
        missing: returns the pip command for what is not installed, or None.
    """

    name: str
    title: str
    dataset: str
    batch_size: int | None
    prepare: Callable[[Path, bool], dict[str, Any]]
    missing: Callable[[], str | None] = nothing_missing


SIDE = 224
NUM_PHOTOS = 4096
NUM_LABELS = 1000
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


RECORD_LENGTH = 1 << 18  # float32 values of a record: 1 MiB
NUM_RECORDS = 256


class Records:
    """Raw float32 records of 1 MiB in a mapped file, as is common for scientific data; an epoch repeats them."""

    schema: dict[str, Field] = {"x": ("float32", (RECORD_LENGTH,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str, num_samples: int) -> None:
        self.path, self.num_samples = path, num_samples
        # Copy on write: rows are writable arrays, as torch's collate wants them, although nothing is written.
        self.records = np.asarray(np.memmap(path, np.float32, mode="c")).reshape(-1, RECORD_LENGTH)

    def __reduce__(self) -> tuple[type["Records"], tuple[str, int]]:
        return Records, (self.path, self.num_samples)  # a pickled map would contain the file's contents

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.records[index % len(self.records)]}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        np.copyto(out["x"], self.records[index % len(self.records)])


def prepare_records(folder: Path, small: bool) -> dict[str, Any]:
    path, count = folder / "records.bin", NUM_RECORDS // (16 if small else 1)
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(draw.random(RECORD_LENGTH, np.float32).data)
    return {"path": str(path), "num_samples": 16 * count}


ROW_LENGTH = 64


class RowsWorkload:
    """Tiny rows, 64 float32 and a label, from an array in memory; reads a whole batch at once."""

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
    """Language-model windows of uint16 tokens in a mapped file, delivered as int64; neighbors share one token."""

    schema: dict[str, Field] = {"tokens": ("int64", (WINDOW,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))

    def __reduce__(self) -> tuple[type["Tokens"], tuple[str]]:
        return Tokens, (self.path,)  # a pickled map would contain the file's contents

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // STRIDE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.tokens[index * STRIDE : index * STRIDE + WINDOW].astype(np.int64)}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        for row, index in zip(out["tokens"], indices, strict=True):
            row[...] = self.tokens[index * STRIDE : index * STRIDE + WINDOW]


def prepare_tokens(folder: Path, small: bool) -> dict[str, Any]:
    path = folder / "tokens.bin"
    count = NUM_WINDOWS // (16 if small else 1) * STRIDE + 1
    path.write_bytes(np.random.default_rng(3).integers(0, 50_257, count, np.uint16).data)
    return {"path": str(path)}


SHAPE = (3, 224, 224)


class Plain:
    """(uint8 image, int label) from memory; a dataset without any loader's protocol, like most users' own."""

    def __init__(self, num_images: int = 256, num_samples: int = 8192) -> None:
        self.images = np.random.default_rng(4).integers(0, 256, (num_images, *SHAPE), np.uint8)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index % len(self.images)], index


def prepare_rows(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_samples": (48 if small else 480) * 1024}


def prepare_plain(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_images": 32, "num_samples": 1024} if small else {}


WORKLOADS = {
    name: Workload(name, title, f"{__name__}:{dataset}", batch_size, prepare, missing)
    for name, title, dataset, batch_size, prepare, missing in (
        ("photos", "JPEG photos of 500x375, cropped to 224 and flipped", "Photos", 64, prepare_photos, missing_codecs),
        ("records", "raw float32 records of 1 MiB from a file in the page cache", "Records", 16, prepare_records, nothing_missing),
        ("rows", "rows of 64 float32 and a label from memory, shuffled", "RowsWorkload", 1024, prepare_rows, nothing_missing),
        ("tokens", "windows of 1,025 uint16 tokens of a mapped file, as int64", "Tokens", 32, prepare_tokens, nothing_missing),
        ("python", "a plain Python dataset of (uint8 3x224x224, int)", "Plain", 64, prepare_plain, nothing_missing),
    )
}
