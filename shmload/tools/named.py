"""Find the objects that a command line names as `package.module:name`, and the source of `shmload pack`.

Every mistake in a name is reported in one line. `shmload bench` names its built-in workloads, the user's dataset, a collate
function and other loaders in this way, so that a job is plain text: it is passed to a fresh process as JSON, and nothing is
pickled. The source of `shmload pack` may also be existing data:

| source | what a sample becomes |
|---|---|
| a folder with a folder for each class | its image and the number of its class |
| a folder of images alone | its image |
| TFRecord files | features by name; a feature of one value is that value. Records that are not an Example: `bin` |
| tar shards | its members unchanged; its key gets the sample's number, because keys of several shards may be equal |
| Parquet, JSON lines, .npy, MDS, LitData; any URL | its fields, as RemoteDataset reads them |
| `package.module:name` | see `remote/packing/encoding.py` |
"""

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmload.errors import ShmloadError

REMEDY = "write package.module:name; the current folder is searched too"


class BenchError(ShmloadError, ValueError):
    """The requested measurement is not possible. The message is one line and says what to change."""


def resolve(spec: str, *, what: str) -> Any:
    """Import the object that `spec` names; `what` is the option that errors mention.

    Raises:
        BenchError: the spec is malformed, its module cannot be imported, or has no such name.
    """
    module_name, colon, path = spec.partition(":")
    if not (colon and module_name and path):
        raise BenchError(f"{what}: needs package.module:name, given {spec!r}; {REMEDY}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise BenchError(f"{what}: cannot import {module_name!r}: {one_line(error)}; {REMEDY}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = sorted(n for n in vars(found) if not n.startswith("_"))[:8]
            hint = f"it has {', '.join(known)}" if known else "it is empty"
            raise BenchError(f"{what}: {module_name!r} has no {name!r}; {hint}") from None
    return found


def make_dataset(spec: str, arguments: Mapping[str, Any]) -> Any:
    """Return the dataset that `spec` names: the object itself, or what the class or function returns.

    Raises:
        BenchError: the factory raised, or the result is not an IterableDataset and lacks `__len__` and `__getitem__`, or it is
            empty.
    """
    made = resolve(spec, what="--dataset")
    if isinstance(made, type) or not (is_map_style(made) or is_iterable(made)):
        made = call(made, arguments, spec)
    if is_iterable(made):
        return made
    if not is_map_style(made):
        kind = type(made).__name__
        raise BenchError(
            f"--dataset {spec}: needs a map-style dataset with __len__ and __getitem__, or an object of a class derived from "
            f"torch.utils.data.IterableDataset, as torch's DataLoader does; given {kind}"
        )
    try:
        num_samples = len(made)
    except Exception as error:
        raise BenchError(f"--dataset {spec}: its __len__ raised {one_line(error)}") from error
    if num_samples == 0:
        raise BenchError(f"--dataset {spec}: needs at least 1 sample, given 0; check the path it reads")
    return made


def call(factory: Any, arguments: Mapping[str, Any], spec: str, *, what: str = "--dataset") -> Any:
    if not callable(factory):
        kind = type(factory).__name__
        raise BenchError(f"{what} {spec}: needs a dataset or a function that returns one, given {kind}")
    try:
        return factory(**arguments)
    except Exception as error:
        raise BenchError(
            f"{what} {spec}: calling it without arguments raised {one_line(error)}; "
            "name a function that needs none and returns the dataset"
        ) from error


def is_map_style(candidate: object) -> bool:
    """Return whether it has samples by index. An IterableDataset with a length does not: its `__getitem__` only raises."""
    return hasattr(candidate, "__len__") and hasattr(candidate, "__getitem__") and not is_iterable(candidate)


def is_iterable(candidate: object) -> bool:
    """Return whether it is one of torch's IterableDatasets, which cannot exist before torch is imported."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(candidate, data.IterableDataset)


def one_line(error: BaseException) -> str:
    """Return the type and first line of an exception."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines and lines[0] else type(error).__name__


def names(values: Iterable[str]) -> list[str]:
    """Return options that may be repeated or contain commas as one list without repetitions."""
    return list(dict.fromkeys(part.strip() for value in values for part in value.split(",") if part.strip()))


def numbers(option: str, values: Iterable[str]) -> tuple[int, ...]:
    """Return options that may be repeated or contain commas as integers.

    Raises:
        BenchError: one of them is not an integer.
    """
    found = names(values)
    for text in found:
        if not text.removeprefix("-").isdecimal():
            raise BenchError(f"{option}: needs whole numbers, one or several with commas between, given {text!r}")
    return tuple(map(int, found))


# ------------------------------------------------------------ the source of `shmload pack`

_OBJECT = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"


def dataset_of(source: str) -> Any:
    """Return the dataset that `source` names.

    Raises:
        OSError, ValueError: it does not exist, or is of a kind that cannot be packed.
    """
    from shmload.formats.braces import shard_paths
    from shmload.formats.compression import packing_of
    from shmload.formats.known_formats import layout_of, recognize_path
    from shmload.formats.paths import expanded
    from shmload.formats.plain_files import PlainFiles
    from shmload.formats.tar.tar_dataset import TarDataset
    from shmload.formats.tar.tar_format import Tar
    from shmload.formats.tfrecord.tfrecord_format import TFRecords
    from shmload.storage.store_urls import is_url

    if is_url(source) or os.path.isdir(source):
        return _of_shards(source) if is_url(source) or _holds_shards(source) else _of_folder(source)
    if not os.path.exists(source) and re.fullmatch(_OBJECT, source):
        made = resolve(source, what="SOURCE")
        is_dataset = not isinstance(made, type) and (is_map_style(made) or is_iterable(made))
        return made if is_dataset else call(made, {}, source, what="SOURCE")
    paths = shard_paths(source) if "{" in source else expanded(source, "sample", beside=(".index", ".shmload-index"))
    if all(layout_of(packing_of(path)[0]) not in (None, Tar(), TFRecords(), PlainFiles()) for path in paths):
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
    """Return the images of a folder, with class numbers if they are in folders by class. Hidden files and folders are ignored."""
    from shmload.formats.file_names import is_hidden
    from shmload.formats.images.image_folder import EXTENSIONS, ImageFolder, find_images

    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    visible = [entry for entry in found if not is_hidden(entry[0])]
    if classes := sorted(name for name, is_folder in visible if is_folder):
        images = [each for each in find_images(folder, classes) if not is_hidden(os.path.relpath(each[0], folder))]
        return ImageFolder([path for path, _ in images], labels=[label for _, label in images])
    names = sorted(name for name, _ in visible if name.lower().endswith(EXTENSIONS))
    if not names:
        hidden = f"; {len(found) - len(visible)} names that begin with . or _ are ignored" if len(visible) < len(found) else ""
        raise ValueError(f"{folder}: no image ({', '.join(EXTENSIONS)}) is in it, and no folder of a class{hidden}")
    return ImageFolder([os.path.join(folder, name) for name in names])


def _holds_shards(folder: str) -> bool:
    """Return whether a folder is a dataset of shards, not of images."""
    from shmload.formats.compression import packing_of
    from shmload.formats.file_names import is_hidden
    from shmload.formats.index_json import INDEX_NAME
    from shmload.formats.known_formats import layout_of
    from shmload.formats.plain_files import PlainFiles
    from shmload.remote.manifest import MANIFEST_NAME

    names = [name for name in os.listdir(folder) if not is_hidden(name)]
    layouts = [layout_of(packing_of(name)[0]) for name in names]
    return bool({MANIFEST_NAME, INDEX_NAME} & set(names)) or any(each not in (None, PlainFiles()) for each in layouts)


def _of_shards(urls: str | list[str]) -> Any:
    from shmload.remote import RemoteDataset

    return RemoteDataset.from_urls(urls).indexed(decode=False)


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
