"""Compare the package versions of a node with this machine's, because code and pickles depend on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

SAME_VERSIONS = (
    'Install the same versions on every node, or name an environment that has them: actor_options={"runtime_env": {"pip": [...]}}'
)


def versions() -> dict[str, str]:
    """Return the versions of this process, by name, that trainer and actor must share; "" for a package that is missing."""
    found = {"Python": "{}.{}".format(*sys.version_info)}
    for name in ("shmload", "torch"):
        try:
            found[name] = version(name).partition("+")[0]  # without the build, because one for CPUs has the same Python code
        except PackageNotFoundError:  # a source tree, or an actor without torch
            found[name] = str(getattr(sys.modules.get(name), "__version__", ""))
    return found


def other_versions(theirs: Mapping[str, str]) -> str:
    """Return a text with the versions of a node that differ from this machine's; empty if all agree."""
    return ", ".join(
        f"{name} {theirs[name] or 'missing'} where the trainer has {version or 'none'}"
        for name, version in versions().items()
        if theirs[name] != version
    )


def version_error(node_id: str, host: str, theirs: Mapping[str, str]) -> str | None:
    """Return the error message for an actor whose node has other versions than this machine; None if they agree."""
    if not (differences := other_versions(theirs)):
        return None
    return (
        f"node {node_id} of the Ray cluster ({host}) has {differences}: pickles from here may fail or have another meaning "
        f"there. {SAME_VERSIONS}"
    )
