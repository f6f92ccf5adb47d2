"""The saved state of a seeded run: a flat, JSON-able dict of eleven fields, for any loader, pipeline or growing cache.

The order is a pure function, so a state holds no indices: which order it is (n, seed, shuffle, global_batch, uneven,
schedule) and how far the run came (epoch, position). World size is left out on purpose: any number of ranks with the
same global batch may resume; where the order makes the batches itself, any number. Mixtures add `counters`, composites
and snapshots `children`; absent where there are none.

The checksum of a state: whatever has kept it since, the loader that takes it knows whether every value is what it was.

It is that of canonical JSON, so JSON there and back, torch.save, another order of keys and tuples in place of lists change nothing.
It tells of damage. Who writes a state on purpose can write its checksum, too; that a state runs no code is codec.py's affair.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast, get_origin, get_type_hints

from shmload.errors import StateMismatch
from shmload.schedule.schedule import BatchSchedule, KeyedOrder, Schedule

__all__ = [
    "CHECK",
    "STATE_VERSION",
    "State",
    "check_checksum",
    "check_state",
    "compare_state",
    "make_state",
    "resume",
    "with_checksum",
]

CHECK = "check"
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its checksum, in place of one that it may have."""
    return {**state, CHECK: _checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Returns if a state is what it was when it was saved.

    Raises:
        StateMismatch: it is not.
    """
    expected = _checksum(state)
    if type(state.get(CHECK)) is not int or state[CHECK] != expected:
        raise StateMismatch(
            f"the state is damaged or was changed by hand: its checksum is {expected}, it says {state.get(CHECK)!r}. Load what "
            "state_dict() returned, of an earlier checkpoint if this one's file is damaged"
        )


def _checksum(state: Mapping[str, Any]) -> int:
    try:
        return zlib.crc32(_canonical({name: value for name, value in state.items() if name != CHECK}).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateMismatch(f"a state is JSON, and this is not: {error}. Load what state_dict() returned") from error


STATE_VERSION = 1


class State(TypedDict):
    """The fields of a state; numbers are Python ints."""

    version: int  # of this format
    schedule: int  # version of the order
    mode: str  # "seed"
    seed: int
    epoch: int
    position: int  # samples of the epoch consumed by all ranks; batches where the order makes the batches
    n: int  # 0 where each epoch has its own: then `children` names it
    global_batch: int  # 0 where the order makes the batches
    shuffle: bool
    uneven: str  # what happens to the rest: "pad", "drop" or "exact"
    check: int  # state.py
    order: NotRequired[str]  # which order it is, where it is not the plain one
    counters: NotRequired[list[int]]  # a mixture's draws so far, per member
    children: NotRequired[dict[str, Any]]  # states of members


_KINDS: dict[str, type] = {name: get_origin(kind) or kind for name, kind in get_type_hints(State).items()}


def make_state(
    schedule: Schedule | BatchSchedule,
    *,
    epoch: int,
    step: int,
    children: Mapping[str, Any] | None = None,
) -> State:
    """The state of a run that goes on at (epoch, step); `step` may be `num_steps`, the epoch's end."""
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        **_identity(schedule),
        "epoch": int(epoch),
        "position": int(schedule.position(step)),
    }
    counters = schedule.counters(epoch, step)
    if counters is not None:
        state["counters"] = counters
    if children is not None:
        state["children"] = dict(children)
    return cast(State, with_checksum(state))


def check_state(state: object) -> State:
    """`state` itself, if it has the fields of a state and they can be read.

    Raises:
        StateMismatch: it is no state of a seeded run, or one of a newer format, or damaged; every fault is named.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {type(state).__name__}")
    mode = state.get("mode", "seed")
    if mode != "seed":
        raise StateMismatch(
            f"this state is of mode {mode!r}, the loader is in mode 'seed': build the loader as it was at saving"
        )
    version = state.get("version")
    if isinstance(version, int) and version > STATE_VERSION:
        raise StateMismatch(
            f"this state has format version {version}, this shmload reads up to {STATE_VERSION}: install a newer one"
        )
    faults = [f"{name} is missing" for name in sorted(State.__required_keys__) if name not in state]
    for name, value in state.items():
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            faults.append(f"{name} is unknown")
        elif type(value) is not kind:
            faults.append(f"{name} must be {kind.__name__}, it is {value!r}")
        elif isinstance(value, int) and value < 0:
            faults.append(f"{name} must not be negative, it is {value}")
    if faults:
        raise StateMismatch(f"this is no state of a seeded run: {'; '.join(faults)}. Load what state_dict() returned")
    check_checksum(state)
    return cast(State, state)


def compare_state(state: State, schedule: Schedule | BatchSchedule) -> None:
    """Return if `state` was saved under the order that `schedule` makes, whatever the number of ranks.

    Raises:
        StateMismatch: it was not; every field that differs is named with both values.
    """
    now = _identity(schedule)
    differing = [
        f"{name}: saved {state.get(name)!r}, now {now.get(name)!r}"
        for name in dict.fromkeys((*now, "order"))
        if state.get(name) != now.get(name)
    ]
    if not differing:
        return
    remedy = "build the loader with the saved values, or start a new run without this state"
    if isinstance(schedule, Schedule) and 0 != state["global_batch"] != schedule.global_batch:
        remedy += (
            f"; global_batch is batch_size * world_size, here {schedule.batch_size} * {schedule.world_size}: "
            "change both together and it stays"
        )
    raise StateMismatch(f"the state belongs to another order: {'; '.join(differing)}. Remedy: {remedy}")


def resume(state: object, schedule: Schedule | BatchSchedule) -> tuple[int, int]:
    """Where a run goes on: (epoch, step) under `schedule`, which may have another world size.

    A state saved at an epoch's end gives step == num_steps of that epoch.

    Raises:
        StateMismatch: `state` is none, belongs to another order, or stands between two steps.
    """
    checked = check_state(state)
    compare_state(checked, schedule)
    try:
        step = schedule.step_at(checked["position"])
    except ValueError as error:
        raise StateMismatch(f"the state's position fits no step: {error}") from error
    if isinstance(schedule.order, KeyedOrder) and "counters" in checked:
        schedule.order.go_on_at(checked["position"], checked["counters"], epoch=checked["epoch"])
    return checked["epoch"], step


def _identity(schedule: Schedule | BatchSchedule) -> dict[str, Any]:
    """The fields that say which order it is."""
    identity = {
        "schedule": schedule.version,
        "mode": "seed",
        "seed": schedule.seed,
        "n": schedule.n,
        "global_batch": schedule.global_batch,
        "shuffle": schedule.shuffle,
        "uneven": schedule.rest_rule,
    }
    return identity if schedule.order is None else {**identity, "order": schedule.order.identity}
