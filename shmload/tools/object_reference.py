"""Import the objects that a command line names as `package.module:name`.

Every mistake in a name is reported in one line. `shmload bench` names its built-in workloads, the user's dataset, a collate
function and other loaders in this way, so that a job is plain text: it is passed to a fresh process as JSON, and nothing is
pickled.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from shmload.errors import ShmloadError

REMEDY = "write package.module:name; the current folder is searched too"


class UsageError(ShmloadError, ValueError):
    """A name or an option on the command line cannot be used. The message is one line and says what to change."""


def resolve(spec: str, *, what: str) -> Any:
    """Import the object that `spec` names; `what` is the option that errors mention.

    Raises:
        UsageError: the spec is malformed, its module cannot be imported, or has no such name.
    """
    module_name, colon, path = spec.partition(":")
    if module_name.endswith(".py") and path:
        module_name = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise UsageError(f"{what}: {spec!r} names a file; write {module_name}:{path}")
    if not (colon and module_name and path):
        raise UsageError(f"{what}: needs package.module:name, given {spec!r}; {REMEDY}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"{what}: cannot import {module_name!r}: {one_line(error)}; {REMEDY}") from error
    where = module_name
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = sorted(n for n in dir(found) if not n.startswith("_"))[:8]
            hint = f"it has {', '.join(known)}" if known else "it is empty"
            raise UsageError(f"{what}: {where!r} has no {name!r}; {hint}") from None
        where += f"{':' if where == module_name else '.'}{name}"
    return found


def make_dataset(spec: str, arguments: Mapping[str, Any]) -> Any:
    """Return the dataset that `spec` names: the object itself, or what the class or function returns.

    Raises:
        UsageError: the factory raised, or the result is not an IterableDataset and lacks `__len__`, or both `__getitem__` and
            the decoding protocol, or it is empty.
    """
    made = resolve(spec, what="--dataset")
    if isinstance(made, type) or not (is_map_style(made) or is_iterable(made) or _decodes(made)):
        made = call(made, arguments, spec)
    if is_iterable(made):
        return made
    kind = type(made).__name__
    if _decodes(made) and not is_map_style(made):
        missing = [name for name in ("schema", "__len__") if not hasattr(made, name)]
        if missing:
            raise UsageError(
                f"--dataset {spec}: {kind} decodes into batches, but has no {' and no '.join(missing)}: "
                f"add {'it' if len(missing) == 1 else 'them'}"
            )
    elif not is_map_style(made):
        raise UsageError(
            f"--dataset {spec}: needs a map-style dataset with __len__ and __getitem__, one with a schema, __len__ and read_into, "
            f"or an object of a class derived from torch.utils.data.IterableDataset, as torch's DataLoader does; given {kind}"
        )
    try:
        num_samples = len(made)
    except Exception as error:
        raise UsageError(f"--dataset {spec}: its __len__ raised {one_line(error)}") from error
    if num_samples == 0:
        raise UsageError(f"--dataset {spec}: needs at least 1 sample, given 0; check the path it reads")
    return made


def call(factory: Any, arguments: Mapping[str, Any], spec: str, *, what: str = "--dataset") -> Any:
    if not callable(factory):
        kind = type(factory).__name__
        raise UsageError(f"{what} {spec}: needs a dataset or a function that returns one, given {kind}")
    try:
        return factory(**arguments)
    except Exception as error:
        raise UsageError(
            f"{what} {spec}: calling it without arguments raised {one_line(error)}; "
            "name a function that needs none and returns the dataset"
        ) from error


def _decodes(candidate: object) -> bool:
    """Return whether it has a method that decodes into rows of a batch."""
    return hasattr(candidate, "read_into") or hasattr(candidate, "read_batch_into")


def is_map_style(candidate: object) -> bool:
    """Return whether it has samples by index. An IterableDataset with a length does not: its `__getitem__` only raises."""
    return hasattr(candidate, "__len__") and hasattr(candidate, "__getitem__") and not is_iterable(candidate)


def is_iterable(candidate: object) -> bool:
    """Return whether it is one of torch's IterableDatasets, which cannot exist before torch is imported."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(candidate, data.IterableDataset)


def one_line(error: BaseException) -> str:
    """Return the type and first line of an exception; of one raised in a worker, the line that the worker's traceback ends with."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if lines and lines[0].startswith(f"Caught {name} in "):
        lines = [line.partition(": ")[2] for line in lines if line.partition(":")[0].endswith(name)][-1:]
    return f"{name}: {lines[0]}" if lines and lines[0] else name
