"""Import optional libraries; an error names the extra that installs them."""

from __future__ import annotations

import importlib
from typing import Any


def library(name: str, extra: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: name of the module.
        extra: the extra of shmload that installs the package.
    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise ModuleNotFoundError(
            f"reading {extra} files needs the package {package}, which is not installed: pip install 'shmload[{extra}]'",
            name=package,
        ) from error
