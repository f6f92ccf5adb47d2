"""Cache: make the items of a sequence once, and afterward read them from a file or from memory.

The file is in a folder (see item_file.py). Its name is a hash of everything that determines the items (see fingerprint.py), so a
changed pipeline uses another file. An item that several processes make at the same time is written once. Caches with equal stages
share a file but not its items, because each draws its own random numbers.
"""

from __future__ import annotations

import functools
import os
import pickle
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shmload.pipeline.fingerprint import fingerprint
from shmload.pipeline.item_file import ItemFile
from shmload.pipeline.item_sequence import Derived, ItemSequence
from shmload.shm import pickling
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept, sample_info, sample_of, seed_and_epoch


@dataclass(frozen=True)
class Cache:
    """A stage that keeps the items of the stages before it, which then run only once for each item.

    Put it where item p is the same in every epoch: after sources, Maps and position stages, but before a Shuffle. Functions draw
    the random numbers of the first epoch, whenever an item is made, so items do not depend on the number of workers or on a resume.

    Args:
        folder: folder for the file, which all processes and runs share. Trust it as you trust pickles. Without one, items are kept
            in the memory of each process that makes them, until the Conveyer is closed.
        version: any text; it becomes part of the hash. Change it when anything changes that the hash does not cover: files that
            functions read, and what they use of other modules. Covered are functions, methods of classes, what they hold, and the
            global variables of their module that they use, if these are functions, classes, plain data or settings (namespaces and
            dataclasses); and the size and time of local files to which a source has a Path or an absolute path, as the datasets of
            shmload.formats do for single files. Not covered are other objects in global variables, such as a composed transform,
            a tokenizer or a functools.partial: give them to the function as arguments of a class or a partial.
    Raises:
        TypeError: an argument has another type.
    """

    folder: str | os.PathLike[str] | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike | None) or not isinstance(self.version, str):
            raise TypeError(f"Cache takes the path of a folder and a word; got {self.folder!r}, {self.version!r}")

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the cached sequence.

        Raises:
            ValueError: its items differ from epoch to epoch, or something that determines them cannot be hashed.
        """
        if not below.is_fixed:
            raise ValueError(
                "their items differ or come in another order in each epoch, so they would be cached again: put Cache before "
                "those stages"
            )
        return Cached(below, None if self.folder is None else Path(self.folder), self.version)


class Cached(Derived):
    """The sequence of a Cache.

    Attributes:
        stream: number of this cache among those of the pipeline, which distinguishes their random numbers.
    """

    stream = 0

    def __init__(self, below: ItemSequence, folder: Path | None, version: str) -> None:
        super().__init__(below, below.n, "Cache")
        self.is_fixed = True
        self._file = None if folder is None else ItemFile(folder / f"{fingerprint(below, version)}.sqlite")
        self._memory: dict[int, bytes] = {}

    def item(self, key: int) -> Any:
        position = key % self.n
        kept = self._memory.get(position) if self._file is None else self._file.read(self.stream, position)
        if kept is not None:
            return pickle.loads(kept)
        with generators_kept(), self._own.kept(), self._sample(position):
            item = self.below.at(position)
        try:
            made = pickling.dumps(item)
        except Exception as error:
            raise TypeError(
                f"Cache keeps items as pickles, and an item of type {type(item).__qualname__} cannot be pickled: put Cache "
                f"before what makes it. {type(error).__name__}: {error}"
            ) from error
        if self._file is None:
            self._memory[position] = made
        else:
            self._file.write(self.stream, position, made)
        return item

    def _sample(self, position: int) -> AbstractContextManager[None]:
        """Return a block that draws the item's numbers of epoch 0, because it may be made in any epoch and process."""
        worker = 0 if seed_and_epoch() is None else sample_info().worker
        return sample_of(self._items_seed, 0, position, worker, own=self._own)

    @property
    def _items_seed(self) -> int:
        """Return the seed of the items' random numbers, which differs from that of the stages after this one."""
        text = f"Cache {self.stream} of seed {self.seed}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    @functools.cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators(self.below)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"} | {"_memory": {}}


def number_caches(sequence: ItemSequence, stream: int = 0) -> int:
    """Give each cache of a pipeline random numbers of its own, also if its members are alike.

    Args:
        sequence: the pipeline's sequence.
        stream: number of the first cache.
    Returns:
        the number of the next cache.
    """
    if isinstance(sequence, Cached):
        sequence.stream, stream = stream, stream + 1
    for part in sequence.parts:
        stream = number_caches(part, stream)
    return stream
