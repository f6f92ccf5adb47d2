"""Import the public names of a package at first use."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, places: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package. `dir` shows its public names, not what it imports for itself.

    Args:
        package: its `__name__`.
        places: the module of each public name.
        modules: names of modules of the package that are imported, too, so that `shmload.debug.read` works after `import shmload`.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        collects = gc.isenabled()
        gc.disable()  # imported objects are permanent, and a collection now would visit everything that torch has made: 50 ms
        try:
            value = getattr(importlib.import_module(places[name]), name)
        finally:
            if collects:
                gc.enable()
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*places, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, names
