"""Small datasets for the packing tests, and functions that list the content of a folder.

A plain module beside the tests, so that workers of every start method can import it.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shmload.formats import TarDataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.dataset_packing import DatasetPacking
from shmload.remote.packing.pack_options import PackOptions
from shmload.storage.local_store import LocalStore
from shmload.storage.store import StoredObject


class Grey:
    """Images of a single shade, with their number; sizes differ."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((2 + index % 5, 3, 3), index % 256, np.uint8), index


class Noisy(Grey):
    """Grey images with noise from all global generators and from one of the dataset's own."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.rng = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        return image + np.uint8(random.randrange(5)) + np.random.randint(5) + self.rng.integers(5, dtype=np.uint8), label


class Blobs:
    """Samples of given sizes."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = list(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        return {"bin": bytes([index % 256]) * self.sizes[index]}


class Folder:
    """An image folder as torchvision's: `samples`, `loader`, no transform."""

    def __init__(self, paths: Iterable[Path], *, transform: Any = None) -> None:
        self.samples = [(str(path), number % 3) for number, path in enumerate(paths)]
        self.transform, self.target_transform = transform, None

    def __len__(self) -> int:
        return len(self.samples)

    def loader(self, path: str) -> Any:
        with Image.open(path) as opened:
            return opened.convert("RGB")

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self.loader(path)
        return (image if self.transform is None else self.transform(image)), label


class CountingStore(LocalStore):
    """A folder that records which objects were written, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "written", [])

    def put(self, key: str, data: Any) -> StoredObject:
        self.written.append(key)
        return super().put(key, data)

    def put_file(self, key: str, path: Path) -> StoredObject:
        self.written.append(key)
        return super().put_file(key, path)


def packed(dataset: Any, store: Any, **given: Any) -> Manifest:
    """Packs in this process, into small shards unless options say otherwise."""
    on_progress = given.pop("on_progress", None)
    options: dict[str, Any] = {"maxsize": 100_000, "maxcount": 10, "workers": 0, "seed": 0, **given}
    return DatasetPacking(dataset, store, PackOptions(**options), on_progress).run()


def samples_in(folder: Path, manifest: Manifest, **options: Any) -> list[dict[str, Any]]:
    """Returns all samples in their stored order."""
    paths = [str(folder / shard.name) for shard in manifest.shards]
    return list(TarDataset(paths, cache=False, **options))  # type: ignore[call-overload]


def names_in(folder: Path) -> list[str]:
    """Returns the names of all files in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all files in a folder by name."""
    return {name: (folder / name).read_bytes() for name in names_in(folder)}


def published_bytes_in(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all files in a folder, except those that a killed writer left."""
    return {name: data for name, data in bytes_in(folder).items() if ".half-" not in name}


def names_of(manifest: Manifest) -> list[str]:
    """Returns the names of all files of a packed dataset."""
    return sorted([*(name for shard in manifest.shards for name in (shard.name, shard.index.name)), "manifest.json"])


def encoded(picture: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()
