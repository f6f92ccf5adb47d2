"""Rebuild a ShmLoader for a framework: code shared by the integrations."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from shmload.errors import StateMismatch
from shmload.loader import ShmLoader

_Loader = TypeVar("_Loader", bound=ShmLoader[Any])
ORDERING = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def orders_itself(loader: ShmLoader[Any]) -> bool:
    """Return whether the loader's seed decides the order of samples, and not a sampler."""
    return loader.seed is not None and not loader._has_users_sampler


def rebuilt(loader: _Loader, **ordering: Any) -> _Loader:
    """Return a loader of the same class with the same arguments, except those in `ordering`, which decide the order of samples.

    The class's own constructor is not called; other attributes of the loader are copied.

    Raises:
        StateMismatch: the loader has loaded a state, which belongs to another order.
    """
    position = loader.__getstate__()["position"]
    has_begun = position and (not position["is_finished"] if loader.seed is None else position["epoch"] or position.get("step"))
    if has_begun:
        raise StateMismatch(
            "this loader is in the middle of an order that prepare divides among processes: load the state into what "
            "prepare returns"
        )
    names = inspect.signature(ShmLoader.__init__).parameters
    made = object.__new__(type(loader))
    ShmLoader.__init__(made, **{n: getattr(loader, n) for n in names if n not in ("self", *ORDERING)}, **ordering)
    for name, value in vars(loader).items():
        made.__dict__.setdefault(name, value)
    return made


def changed(loader: _Loader, **arguments: Any) -> _Loader:
    """Return a loader with other arguments, none of which is in `ORDERING`. It continues at this loader's position.

    Raises:
        StateMismatch: the loader is within an epoch whose batches differ with these arguments.
    """
    state = {**loader.__getstate__(), **arguments}
    position = state.pop("position")
    made = object.__new__(type(loader))
    made.__dict__.update(state)
    made._set_up()
    if position is not None and (not orders_itself(loader) or position["epoch"] or position["position"]):
        made._passes.go_on_as_copy(position)
    return made
