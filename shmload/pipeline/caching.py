"""Cache: items of a row that are made once, and read from a file, or from memory, whenever they come again.

A file is one of SQLite, in a folder, named by what made the items: sources with what they hold, the stages' arguments, the code
of their functions. So a pipeline that has changed has another file, and what several processes make at once is written once.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import pickle
import sqlite3
import types
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shmload.pipeline.sources import Derived, Items, Keys, Mapped

BUSY_S = 60.0  # that a write waits for others' to end


@dataclass(frozen=True)
class Cache:
    """Keeps what comes from the stages before it; those run once for each item.

    It stands where item p is the same in every epoch: behind sources, Maps and stages of places, before a Shuffle. What their
    functions drew at random the first time stays.

    Args:
        folder: where the file lies, for all processes and runs that read it. Trust it as you trust pickles. None: in the memory
            of each process that makes items, for as long as it lives.
        version: a word of yours that is part of the file's name, for what the name does not see: files that functions read.
    """

    folder: str | os.PathLike[str] | None = None
    version: str = ""

    def over(self, below: Keys) -> Keys:
        """What it makes of a row.

        Raises:
            ValueError: its items differ from epoch to epoch, or what made them has no name.
        """
        if not below.is_fixed:
            raise ValueError(
                "its items come in another order, or are others, in each epoch, and would be kept anew: put Cache before that"
            )
        return Cached(below, None if self.folder is None else Path(self.folder), self.version)


class Cached(Derived):
    """See Cache."""

    def __init__(self, below: Keys, folder: Path | None, version: str) -> None:
        super().__init__(below, below.n, "Cache")
        self.is_fixed = True
        self._path = None if folder is None else folder / f"{fingerprint(below, version)}.sqlite"
        self._memory: dict[int, bytes] = {}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _begin(self._path)

    def item(self, key: int) -> Any:
        place = key % self.n
        kept = self._memory.get(place) if self._path is None else _read(self._path, place)
        if kept is not None:
            return pickle.loads(kept)
        item = self.below.at(place)
        made = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        if self._path is None:
            self._memory[place] = made
        else:
            _write(self._path, place, made)
        return item

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_memory": {}}


def _begin(path: Path) -> None:
    """Makes the file, if it is not there: before workers open it, as SQLite does not wait for another that changes its mode."""
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = _connected(path)
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("CREATE TABLE IF NOT EXISTS items (place INTEGER PRIMARY KEY, item BLOB NOT NULL)")
        file.close()


def _connected(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    file.execute("PRAGMA synchronous=OFF")  # what a crash of the machine loses is made again
    return file


@functools.cache
def _opened(path: Path, pid: int) -> sqlite3.Connection:
    """This process's own connection: SQLite's must not be used, nor closed, behind a fork."""
    return _connected(path)


def _read(path: Path, place: int) -> bytes | None:
    found = _opened(path, os.getpid()).execute("SELECT item FROM items WHERE place = ?", (place,)).fetchone()
    return None if found is None else found[0]


def _write(path: Path, place: int, item: bytes) -> None:
    _opened(path, os.getpid()).execute("INSERT OR IGNORE INTO items VALUES (?, ?)", (place, item))


def fingerprint(row: Keys, version: str) -> str:
    """A name for what makes the items of a row.

    Raises:
        ValueError: a source's items do not pickle, so nothing tells them from others.
    """
    made = blake2b(version.encode(), digest_size=16)
    for part in _parts(row):
        made.update(f"{len(part)}:".encode())
        made.update(part)
    return made.hexdigest()


def _parts(row: Keys) -> list[bytes]:
    found = [row.identity.encode()]
    if isinstance(row, Items):
        try:
            found.append(pickle.dumps(row.items))
        except Exception as error:
            raise ValueError(
                f"what {row.identity} holds does not pickle ({error}), so nothing would tell it from another"
            ) from error
    if isinstance(row, Mapped):
        found += [b"\n".join(_code(stage.function)) for stage in row.functions]
    for below in row.parts:
        found += _parts(below)
    return found


def _code(function: Any) -> list[bytes]:
    """What a function does, as far as can be seen: its name and code, and of an object its class and what it holds."""
    if isinstance(function, functools.partial):
        return [*_code(function.func), repr((function.args, function.keywords)).encode()]
    if isinstance(function, types.MethodType):
        return [*_code(function.__func__), *_code(function.__self__)]
    if isinstance(function, types.FunctionType):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        return [function.__qualname__.encode(), *_compiled(function.__code__), repr((function.__defaults__, held)).encode()]
    kind = type(function)
    called = inspect.getattr_static(kind, "__call__", None)
    code = _compiled(called.__code__) if isinstance(called, types.FunctionType) else []
    name = getattr(function, "__qualname__", kind.__qualname__)
    return [f"{kind.__module__}.{name}".encode(), *code, repr(getattr(function, "__dict__", None)).encode()]


def _compiled(code: types.CodeType) -> list[bytes]:
    found = [code.co_code, repr(code.co_names).encode()]
    for constant in code.co_consts:
        found += _compiled(constant) if isinstance(constant, types.CodeType) else [repr(constant).encode()]
    return found
