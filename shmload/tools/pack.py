"""The dataset that a command line names: a folder of images, files of samples, or an object of a module.

| source | what a sample becomes |
|---|---|
| a folder with a folder for each class | its image and the number of its class |
| a folder of images alone | its image |
| TFRecord files | features by name; a feature of one value is that value. Records that are no Example: `bin` |
| tar shards | its members as they are; its key gets the sample's number, as keys of several shards may be alike |
| `package.module:name` | see `members.py` |
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.formats.images.folder import EXTENSIONS, ImageFolder
from shmload.formats.paths import expanded, shard_paths
from shmload.formats.tar.dataset import TarDataset
from shmload.formats.tfrecord.dataset import TFRecordDataset
from shmload.tools.inspect.formats import features_of, recognise
from shmload.tools.named import call, is_map_style, resolve

_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def dataset_of(source: str) -> Any:
    """The dataset that `source` names.

    Raises:
        OSError, ValueError: there is none, or it is of no kind that can be packed.
    """
    if os.path.isdir(source):
        return _of_folder(source)
    if not os.path.exists(source) and _OBJECT.fullmatch(source):
        made = resolve(source, what="SOURCE")
        return call(made, {}, source) if isinstance(made, type) or not is_map_style(made) else made
    paths = shard_paths(source) if "{" in source else expanded(source, "sample", beside=(".index", ".shmload-index"))
    kind = recognise(Path(paths[0]))[0].name
    if kind == "tar":
        return TarDataset(paths, decode=False, cache=False)
    if kind == "TFRecord":
        return Examples(paths)
    raise ValueError(
        f"{paths[0]} is {kind}: folders of images, TFRecord files and tar shards are packed as they are. Write a function that "
        "returns a dataset of it, and name that: package.module:function"
    )


def _of_folder(folder: str) -> ImageFolder:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    if any(is_folder for _, is_folder in found):
        return ImageFolder(folder)
    names = sorted(name for name, _ in found if name.lower().endswith(EXTENSIONS))
    if not names:
        raise ValueError(f"{folder}: no image ({', '.join(EXTENSIONS)}) is in it, and no folder of a class")
    return ImageFolder([os.path.join(folder, name) for name in names])


class Examples:
    """Records of TFRecord files, as dicts of their features."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._records = TFRecordDataset(paths)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._records[index]["bytes"]
        features = features_of(record)
        if features is None:
            return {"bin": record}
        return {name: _single(values) for name, values in features.items()}


def _single(values: Any) -> Any:
    """The one value; else all: an array, or of bytes a list, which nothing keeps."""
    return values[0] if len(values) == 1 else np.asarray(values) if isinstance(values, np.ndarray) else list(values)
