"""Compute the name of a Cache's file: a hash of everything that determines its items.

It covers the sources with their contents, the stages' arguments, and the code of their functions and methods with the variables
they use. Of local files that a source names, it covers size and modification time.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import stat
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from shmload.batch.packed_batch import ATOMS
from shmload.introspect.abilities import package_ability
from shmload.pipeline.item_sequence import ItemSequence

FORMAT = 3  # of the files: those with another number are not read


def fingerprint(sequence: ItemSequence, version: str) -> str:
    """Return a hash of everything that determines the items of a sequence.

    Raises:
        ValueError: a source or a function contains something that cannot be pickled, and so cannot be hashed.
    """
    made = blake2b(f"{FORMAT} {version}".encode(), digest_size=16)
    for whose, part, is_dataset in _parts(sequence):
        identity = package_ability(part, "cache_identity")
        try:
            _Namer(made, covers_files=is_dataset).dump(part if identity is None else identity())
        except Exception as error:
            raise ValueError(
                f"{whose} contains a value that cannot be pickled ({error}), so the cache cannot tell its items from others"
            ) from error
    return made.hexdigest()


def _parts(sequence: ItemSequence) -> Iterator[tuple[str, Any, bool]]:
    """Yield everything that distinguishes a sequence from others: its owner's name, the part, and whether it is a dataset."""
    yield sequence.identity, sequence.identity, False
    for whose, part in sequence.held:
        yield whose, part, part is sequence.dataset
    for below in sequence.parts:
        yield from _parts(below)


class _Namer(pickle.Pickler):
    """A pickler that feeds a hash with an object's contents and the code of functions, equally for equal objects in any process.

    Args:
        made: the hash.
        covers_files: add size and time of the files to which the object has paths. Functions may have paths of files that they
            write.
    """

    def __init__(self, made: blake2b, *, covers_files: bool = False) -> None:
        super().__init__(types.SimpleNamespace(write=made.update), pickle.HIGHEST_PROTOCOL)
        self._covers_files = covers_files
        self._seen: dict[int, tuple[int, Any]] = {}  # functions and classes, which may refer to themselves

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if self._covers_files and (isinstance(value, PurePath) or (kind is str and value.startswith(os.sep))):
            return _file_identity(value)
        if kind in ATOMS:
            return None
        if kind is set or kind is frozenset:  # their order differs from process to process
            return kind.__name__, sorted(map(_digest, value))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            words = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return kind, str(value.dtype), tuple(value.shape), words.numpy()
        if kind is types.CodeType:
            return value.co_code, value.co_names, value.co_consts
        if kind is types.ModuleType:
            return "module", value.__name__
        if kind is types.MethodType:
            return value.__func__, value.__self__
        if isinstance(value, functools._lru_cache_wrapper):
            return "lru_cache", value.__wrapped__
        if kind is not types.FunctionType and not isinstance(value, type):
            return None
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, type):
            return value.__module__, value.__qualname__, _methods_of(value)
        held = [_content(cell) for cell in value.__closure__ or ()]
        return value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, held, _globals_of(value)


def _file_identity(path: str | PurePath) -> Any:
    """Return the path of a local file with its size and time; None if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # text with a null character is not a path
        return None
    return (os.fsencode(path), status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the plain data, and the functions and classes of a function's own module, that its code names, sorted by name."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    found = [(name, _function_in(function.__globals__[name])) for name in sorted(names & function.__globals__.keys())]
    return [
        (name, value)
        for name, value in found
        if _is_data(value) or (isinstance(value, types.FunctionType | type) and value.__module__ == function.__module__)
    ]


_WRAPPERS: tuple[tuple[Any, str], ...] = (
    (property, "fget"),
    (staticmethod, "__func__"),
    (classmethod, "__func__"),
    (functools.cached_property, "func"),
    (functools._lru_cache_wrapper, "__wrapped__"),
)  # types of objects that call one function, and the attribute with the function


def _function_in(value: Any) -> Any:
    """Return the function that a property or another of `_WRAPPERS` calls; any other value unchanged."""
    for kind, name in _WRAPPERS:
        if isinstance(value, kind):
            return _function_in(getattr(value, name))
    return value


def _is_data(value: Any) -> bool:
    """Return whether a value is plain data: a number, text, an array, a tensor, a path, or a container of them and of itself.

    Namespaces and dataclasses count as containers, because programs keep their settings in them.
    """
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        is_record = isinstance(one, types.SimpleNamespace | argparse.Namespace) or (is_dataclass(one) and hasattr(one, "__dict__"))
        if is_record and not isinstance(one, type):
            one = vars(one)
        if isinstance(one, dict | list | tuple | set | frozenset):
            if id(one) not in seen:
                seen.add(id(one))
                waiting += [*one.keys(), *one.values()] if isinstance(one, dict) else one
        elif type(one) not in ATOMS and not isinstance(one, np.ndarray | np.generic | torch.Tensor | PurePath):
            return False
    return True


def _methods_of(kind: type) -> str:
    """Hash the methods of a class and its bases, what they hold and use, and its plain data, identically in every process.

    Unlike `_Namer`, this leaves out values that cannot be hashed, because methods of libraries may hold any.
    """
    return blake2b(repr(_described(kind, {})).encode(), digest_size=16).hexdigest()


def _described(value: Any, seen: dict[int, int]) -> Any:
    """Return the code, and the plain data, of a class or a function and of all that it uses, as built-in values.

    Args:
        value: the class or the function.
        seen: numbers of the classes and functions described so far, by id, because they may refer to each other.
    """
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, types.FunctionType):
        found: list[Any] = [_stable(value.__code__)]
        parts = [("", one) for one in (*(value.__defaults__ or ()), *map(_content, value.__closure__ or ()))]
        parts += [*sorted((value.__kwdefaults__ or {}).items()), *_globals_of(value)]
    else:
        found = [value.__qualname__]
        members = [(name, _function_in(one)) for base in value.__mro__[:-1] for name, one in sorted(vars(base).items())]
        parts = [(name, one) for name, one in members if isinstance(one, types.FunctionType) or not name.startswith("__")]
    for name, part in parts:
        if _is_data(part):
            found.append((name, _digest(part)))
        elif isinstance(part, types.FunctionType | type):
            found.append((name, _described(part, seen)))
    return found


def _stable(constant: Any) -> Any:
    """Convert a constant of a function so that its repr is the same in every process."""
    if isinstance(constant, types.CodeType):
        return constant.co_code, constant.co_names, [_stable(one) for one in constant.co_consts]
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _digest(value: Any) -> bytes:
    made = blake2b(digest_size=16)
    _Namer(made).dump(value)
    return made.digest()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
