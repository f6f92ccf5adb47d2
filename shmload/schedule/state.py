"""Make, check and resume the saved state of a seeded run: a flat dict of eleven fields that JSON can represent.

Loaders, pipelines and growing caches use it. The order is a pure function, so a state contains no indices. It contains which order
it is (n, seed, shuffle, global_batch, uneven, schedule) and how far the run has come (epoch, position). World size is left out on
purpose: any number of ranks with the same global batch may resume, and if the order makes the batches itself, any number. Orders
other than the plain one add `order`, mixtures `counters`, and composites and snapshots `children`.
"""

from collections.abc import Collection, Mapping
from typing import Any, NotRequired, TypedDict, cast, get_origin, get_type_hints

from shmload.errors import StateMismatch
from shmload.schedule.keyed_batches import BatchSchedule
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.schedule import Schedule
from shmload.schedule.state_checksum import check_checksum, with_checksum

STATE_VERSION = 1


class State(TypedDict):
    """The fields of a state; numbers are Python ints."""

    version: int  # of this format
    schedule: int  # version of the order
    mode: str  # "seed"
    seed: int
    epoch: int
    position: int  # samples of the epoch consumed by all ranks; batches, if the order makes the batches
    n: int  # 0 if each epoch has its own length; `children` then names the snapshot
    global_batch: int  # 0 if the order makes the batches
    shuffle: bool
    uneven: str  # how the rest is divided: "pad", "drop" or "exact"
    check: int  # state_checksum.py
    order: NotRequired[str]  # identity of the order, if it is not the plain one
    dataset: NotRequired[str]  # identity of the dataset's own order, if it has one
    counters: NotRequired[list[int]]  # draws of a mixture so far, per member
    children: NotRequired[dict[str, Any]]  # states of members


_KINDS: dict[str, tuple[type, ...]] = {name: (get_origin(kind) or kind,) for name, kind in get_type_hints(State).items()}


def check_head(state: object, mode: str, version: int, remedy: str) -> Mapping[Any, Any]:
    """Return the state after checking that it is of this mode and not of a newer version.

    Args:
        state: the state.
        mode: "seed" or another mode.
        version: newest format version that can be read.
        remedy: what to do about a state of another mode; ends the message.
    Raises:
        StateMismatch: it is not.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {type(state).__name__}")
    if (saved := state.get("mode", mode)) != mode:
        raise StateMismatch(f"this state is of mode {saved!r}, the loader is in mode {mode!r}: {remedy}")
    if isinstance(found := state.get("version"), int) and found > version:
        raise StateMismatch(f"this state has format version {found}, this shmload reads up to {version}: install a newer one")
    return state


def faults_in(
    state: Mapping[Any, Any], kinds: Mapping[str, tuple[type, ...]], *, optional: Collection[str] = (), signed: Collection[str] = ()
) -> list[str]:
    """Return a description of each fault in the fields of a state.

    Args:
        state: the state.
        kinds: the types allowed for each field. Integers must not be negative; lists contain such integers, or dicts.
        optional: fields that may be missing.
        signed: fields whose integers may be negative.
    """
    faults = [f"{name} is missing" for name in sorted(kinds.keys() - {*optional, *state})]
    for name, value in state.items():
        if name not in kinds:
            faults.append(f"{name} is unknown")
        elif type(value) not in kinds[name]:
            faults.append(f"{name} must be {kinds[name][0].__name__}, it is {value!r:.100}")
        elif type(value) is int and value < 0 and name not in signed:
            faults.append(f"{name} must not be negative, it is {value}")
        elif type(value) is list and not all(type(each) is dict or (type(each) is int and each >= 0) for each in value):
            faults.append(f"{name} is {value!r:.100}")
    return faults


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a description of each field of `now` whose value in `saved` differs."""
    return [f"{name}: saved {saved.get(name)!r}, now {value!r}" for name, value in now.items() if saved.get(name) != value]


def make_state(
    schedule: Schedule | BatchSchedule,
    *,
    epoch: int,
    step: int,
    children: Mapping[str, Any] | None = None,
    dataset: str | None = None,
) -> State:
    """Return the state of a run that continues at (epoch, step).

    Args:
        schedule: the schedule of the run.
        epoch: the epoch.
        step: the next step; it may be the end of the epoch.
        children: further entries, such as `AnySchedule.children` returns; None for none.
        dataset: identity of the dataset's own order; None if its items are the same for every index.
    """
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
    if dataset is not None:
        state["dataset"] = dataset
    return cast(State, with_checksum(state))


def check_state(state: object) -> State:
    """Return `state` after checking its fields.

    Raises:
        StateMismatch: it is not a state of a seeded run, has a newer format, or is damaged; the message lists every fault.
    """
    head = check_head(state, "seed", STATE_VERSION, "build the loader as it was at saving")
    faults = faults_in(head, _KINDS, optional=State.__optional_keys__)
    if faults:
        raise StateMismatch(f"this is not a state of a seeded run: {'; '.join(faults)}. Load what state_dict() returned")
    check_checksum(head)
    return cast(State, head)


def compare_state(state: State, schedule: Schedule | BatchSchedule, dataset: str | None = None) -> None:
    """Check that `state` was saved under the order of `schedule`; the number of ranks may differ.

    Args:
        state: the state.
        schedule: the schedule now.
        dataset: as in `make_state`, now.
    Raises:
        StateMismatch: it was not; the message lists every differing field with both values.
    """
    now = _identity(schedule)
    if not (differing := differences(state, {**now, "order": now.get("order"), "dataset": dataset})):
        return
    remedy = "build the loader with the saved values, or start a new run without this state"
    if isinstance(schedule, Schedule) and 0 != state["global_batch"] != schedule.global_batch:
        remedy += (
            f"; global_batch is batch_size * world_size, here {schedule.batch_size} * {schedule.world_size}: "
            "change both together and it stays"
        )
    raise StateMismatch(f"the state belongs to another order: {'; '.join(differing)}. Remedy: {remedy}")


def resume(state: object, schedule: Schedule | BatchSchedule, dataset: str | None = None) -> tuple[int, int]:
    """Return the (epoch, step) at which a run continues under `schedule`, which may have another world size.

    A state saved at the end of an epoch gives step == num_steps of that epoch. `dataset` is as in `make_state`, now.

    Raises:
        StateMismatch: `state` is invalid, belongs to another order, or is between two steps.
    """
    checked = check_state(state)
    compare_state(checked, schedule, dataset)
    try:
        step = schedule.step_at(checked["position"])
    except ValueError as error:
        raise StateMismatch(f"the state's position fits no step: {error}") from error
    if isinstance(schedule.order, KeyedOrder) and "counters" in checked:
        schedule.order.go_on_at(checked["position"], checked["counters"], epoch=checked["epoch"])
    return checked["epoch"], step


def _identity(schedule: Schedule | BatchSchedule) -> dict[str, Any]:
    """Return the fields that identify the order."""
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
