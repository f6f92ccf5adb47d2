"""The compiled modules. Their source and docstrings are in src/; the .pyi files here have their types."""

from importlib.util import find_spec
from pathlib import Path

if find_spec("shmload._core.mapping") is None:
    raise ImportError(
        "shmload's compiled modules are missing: Python has found a source tree that was not built, "
        f"{Path(__file__).parents[2]}. "
        "If shmload is installed, run your program from another folder, and keep it there. Otherwise install shmload with "
        "`pip install .` (needs a C compiler), or for development with `pip install -e .`"
    )
