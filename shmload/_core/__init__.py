"""The compiled modules. Their source and docstrings are in src/; the .pyi files here have their types."""

from importlib.util import find_spec

if find_spec("shmload._core.mapping") is None:
    raise ImportError(
        "shmload's compiled modules are missing: this is a source tree that was not built. Install it with `pip install .` "
        "(needs a C compiler), or for development `pip install -e .`"
    )
