"""Open the source of `shmload pack`: an object that it names, or existing data.

| source | what a sample becomes |
|---|---|
| a folder with a folder for each class, and no image beside these | its image and the number of its class |
| a folder of images alone | its image |
| TFRecord files | features by name; a feature of one value is that value. Records that are not an Example: `bin` |
| tar shards | its members unchanged; its key gets the sample's number, because keys of several shards may be equal |
| Parquet, JSON lines, .npy, MDS, LitData; any URL | its fields, as RemoteDataset reads them |
| `package.module:name` | see `remote/packing/members.py` |
"""

import mimetypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shmload.tools.counted import counted
from shmload.tools.object_reference import call, is_iterable, is_map_style, resolve

_OTHER_FILES = (
    "For files that are no images, --in-order packs each as a sample, and package.module:function names a dataset of them"
)
_OBJECT = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"


def dataset_of(source: str, layout: str | None = None) -> Any:
    """Return the dataset that `source` names.

    Args:
        source: a path, a URL, or package.module:name.
        layout: format of shards, as for RemoteDataset; None recognizes it.
    Raises:
        OSError, ValueError: it does not exist, or is of a kind that cannot be packed.
    """
    from shmload.formats.braces import shard_paths
    from shmload.formats.compression import split_compression
    from shmload.formats.known_formats import layout_of, recognize_path
    from shmload.formats.paths import expanded
    from shmload.formats.plain_files import PlainFiles
    from shmload.formats.tar.tar_dataset import TarDataset
    from shmload.formats.tar.tar_format import Tar
    from shmload.formats.tfrecord.tfrecord_format import TFRecords
    from shmload.storage.store_urls import is_url

    if layout is not None:
        return _of_shards(source, layout)
    if is_url(source) or os.path.isdir(source):
        return _of_shards(source) if is_url(source) or _holds_shards(source) else _of_folder(source)
    if not os.path.exists(source) and re.fullmatch(_OBJECT, source):
        made = resolve(source, what="SOURCE")
        is_dataset = not isinstance(made, type) and (is_map_style(made) or is_iterable(made))
        return made if is_dataset else call(made, {}, source, what="SOURCE")
    paths = shard_paths(source) if "{" in source else expanded(source, "sample", beside=(".index", ".shmload-index"))
    if all(layout_of(split_compression(path)[0]) not in (None, Tar(), TFRecords(), PlainFiles()) for path in paths):
        return _of_shards([os.path.abspath(path) for path in paths])
    kind = recognize_path(Path(paths[0]))[0]
    if isinstance(kind, Tar):
        return TarDataset(paths, decode=False, cache=False)
    if isinstance(kind, TFRecords):
        return Examples(paths)
    raise ValueError(
        f"{paths[0]} is {kind.title}: folders of images, TFRecord, Parquet, JSON lines, .npy and tar files are packed as they are. "
        "Write a function that returns a dataset of it, and name that: package.module:function"
    )


def _of_folder(folder: str) -> Any:
    """Return the images of a folder, with class numbers if they are in folders by class. Hidden files and folders are ignored.

    Raises:
        ValueError: the folder contains no image, images beside folders of classes, which have no class, or pictures that would be
            left out because of their endings.
    """
    from shmload.formats.file_names import is_hidden
    from shmload.formats.images.image_folder import EXTENSIONS, ImageFolder, find_images
    from shmload.storage.folder_walk import walk_following_links

    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    visible = [entry for entry in found if not is_hidden(entry[0])]
    if classes := sorted(name for name, is_folder in visible if is_folder):
        if loose := sorted(name for name, is_folder in visible if not is_folder and name.lower().endswith(EXTENSIONS)):
            raise ValueError(
                f"{folder}: {counted(len(loose), 'image')} ({', '.join(loose[:3])}{', ...' if len(loose) > 3 else ''}) beside the "
                f"folders of classes ({', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}) would be left out, having "
                "no class: move them into the folder of a class or elsewhere; if there are no classes, move all images into "
                "one folder"
            )
        inside = (walk_following_links(os.path.join(folder, name)) for name in classes)
        paths = (os.path.join(parent, file) for walk in inside for parent, _, files in walk for file in files)
        _check_endings(folder, (path for path in paths if not is_hidden(os.path.relpath(path, folder))))
        try:
            images = [each for each in find_images(folder, classes) if not is_hidden(os.path.relpath(each[0], folder))]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}. {_OTHER_FILES}") from None
        return ImageFolder([path for path, _ in images], labels=[label for _, label in images])
    names = sorted(name for name, _ in visible if name.lower().endswith(EXTENSIONS))
    if not names:
        hidden = f"; {len(found) - len(visible)} names that begin with . or _ are ignored" if len(visible) < len(found) else ""
        raise ValueError(
            f"{folder}: contains no image ({', '.join(EXTENSIONS)}) and no folder, which would be a class{hidden}. {_OTHER_FILES}"
        )
    _check_endings(folder, (name for name, _ in visible))
    return ImageFolder([os.path.join(folder, name) for name in names])


def _check_endings(folder: str, names: Iterable[str]) -> None:
    """Raise ValueError if pictures or films among these names have an ending that is not packed."""
    from shmload.formats.images.image_folder import EXTENSIONS

    endings = Counter(os.path.splitext(name)[1].lower() for name in names)
    types = {ending: mimetypes.guess_type(f"x{ending}")[0] or "" for ending in endings.keys() - set(EXTENSIONS)}
    others = {ending: endings[ending] for ending, kind in sorted(types.items()) if kind.startswith(("image/", "video/"))}
    if others:
        raise ValueError(
            f"{folder}: {counted(sum(others.values()), 'file')} would be left out, because images of these endings are not packed "
            f"from a folder: {', '.join(f'{count} {ending}' for ending, count in others.items())}. Convert them to one of "
            f"{', '.join(EXTENSIONS)}, move them elsewhere, or name a function that returns a dataset of them: "
            "package.module:function"
        )


def _holds_shards(folder: str) -> bool:
    """Return whether a folder is a dataset of shards, not of images."""
    from shmload.formats.compression import split_compression
    from shmload.formats.file_names import is_hidden
    from shmload.formats.index_json import INDEX_NAME
    from shmload.formats.known_formats import layout_of
    from shmload.formats.plain_files import PlainFiles
    from shmload.remote.manifest import MANIFEST_NAME

    names = [name for name in os.listdir(folder) if not is_hidden(name)]
    kinds = [layout_of(split_compression(name)[0]) for name in names]
    return bool({MANIFEST_NAME, INDEX_NAME} & set(names)) or any(each not in (None, PlainFiles()) for each in kinds)


def _of_shards(urls: str | list[str], layout: str | None = None) -> Any:
    from shmload.remote import RemoteDataset

    return RemoteDataset.from_urls(urls, layout=layout).indexed(decode=False)


class FlatSamples:
    """The results of a function for each sample of a dataset: any number of them, in order."""

    def __init__(self, dataset: Any, function: Any) -> None:
        self._dataset, self._function = dataset, function

    def __iter__(self) -> Iterator[Any]:
        each = map(self._dataset.__getitem__, range(len(self._dataset))) if is_map_style(self._dataset) else self._dataset
        for sample in each:
            yield from self._function(sample)


class Examples:
    """Records of TFRecord files, as dicts of their features."""

    def __init__(self, paths: Sequence[str]) -> None:
        from shmload.formats.tfrecord.tfrecord_dataset import TFRecordDataset

        self._records = TFRecordDataset(paths)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from shmload.formats.tfrecord.tfrecord_format import sample_of

        return sample_of(self._records[index]["bytes"])
