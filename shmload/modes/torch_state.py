"""A state in torch mode: its fields, its packing and its checks.

A state contains:

    {"version", "mode": "torch", "batch_size", "drop_last", "n",    which loader it belongs to
     "index_sampler", "dataset",                                    its sampler, if that is torch's own; the dataset's own order
     "position", "is_finished",                                     batches delivered; whether the pass has ended
     "check",                                                       see schedule/state_checksum.py
     "details"}                                                     the rest, in one string (see schedule/state_codec.py):

     "snapshot", "num_workers", "last_worker", "base_seed", "shared_seed",  where a resumed loader starts reading
     "done", "beyond",                                              all orders before `done` are complete, and these after it
     "counts", "counted"                                            of an iterable dataset: complete orders by worker, now and in
                                                                    the snapshot
     "dataset_pass"                                                 the number of an iterable dataset's pass (dataset_pass.py)
     "ahead"                                                        batches that the sampler had been asked for
     "generators"                                                   checksums of the global generators (see continuation.py)
     "passes"                                                       passes begun so far, for audits
     "sampler": {...}, "workers": [...]                             see sampler_reader.py and worker/snapshot.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmload.engine.config import LoaderConfig
from shmload.errors import StateMismatch
from shmload.introspect.abilities import package_ability
from shmload.modes.sampler_reader import SamplerState, own_state
from shmload.modes.torch_samplers import described, is_endless, is_torchs_own
from shmload.schedule import state as states
from shmload.schedule import state_checksum
from shmload.schedule.state_checksum import CHECK, with_checksum
from shmload.schedule.state_codec import UsersOwn, opened, sealed
from shmload.worker.snapshot import OWN_STATES, Snapshot

TORCH_STATE_VERSION = 2  # 2 adds `generators`, `ahead`, and the seeds of a pass through an iterable dataset; 1 is still read
TorchState = dict[str, Any]
OWN, SAMPLER, DATASET = "by a sampler's own state", "by a sampler", "by an iterable dataset"  # how a pass is resumed

_IDENTITY = ("version", "mode", "n", "batch_size", "drop_last", "index_sampler", "dataset")
_OUTSIDE = (*_IDENTITY, "position", "is_finished")
_LISTS = ("beyond", "workers", "counts", "counted")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("position", "snapshot", "done", "num_workers", "last_worker", "passes", "ahead", "dataset_pass"), (int,)),
    **dict.fromkeys(("base_seed", "shared_seed"), (int, type(None))),
    **dict.fromkeys(_LISTS, (list,)),
    "is_finished": (bool,),
    **dict.fromkeys(("sampler", "generators"), (dict,)),
}
_OPTIONAL = ("counts", "counted", "dataset_pass", "ahead", "generators")
_OF_SAMPLER = {"taken": int, "epoch": object, "own": dict, "origin": dict, "seed_between": bool, "digest": int}


def packed_state(state: TorchState) -> TorchState:
    """Return a state as it is given to the user."""
    sampler, workers = dict(state["sampler"]), [dict(s) for s in state["workers"]]
    for holder, name in [(sampler, "own"), *((s, name) for s in workers for name in OWN_STATES)]:
        if name in holder:
            holder[name] = UsersOwn(holder[name])
    inside = {name: value for name, value in state.items() if name not in _OUTSIDE}
    inside.update(sampler=sampler, workers=workers)
    return with_checksum({**{name: state[name] for name in _OUTSIDE}, "details": sealed(inside)})


def has_own_states(workers: list[Snapshot]) -> bool:
    """Return whether any worker's snapshot has a state of the user's objects."""
    return any(name in snapshot for snapshot in workers for name in OWN_STATES)


def identity(config: LoaderConfig) -> dict[str, Any]:
    """Return the fields that identify what a loader reads."""
    return {
        "version": TORCH_STATE_VERSION,
        "mode": "torch",
        "n": config.num_samples,
        "batch_size": config.batch_size,
        "drop_last": bool(config.drop_last),
        "index_sampler": described(config.index_sampler),
        "dataset": package_ability(config.dataset, "order_identity"),
    }


def check_torch_state(state: Any, config: LoaderConfig) -> TorchState:
    """Return the state with its details unpacked, if this loader can continue from it.

    Raises:
        StateMismatch: it cannot; the message lists what differs.
    """
    if not isinstance(state, Mapping) or "mode" not in state or (state["mode"] == "torch" and "details" not in state):
        shown = f"a dict with the keys {sorted(map(str, state))}" if isinstance(state, dict) else type(state).__name__
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {shown}")
    states.check_head(state, "torch", TORCH_STATE_VERSION, f"give ShmLoader the seed {state.get('seed')!r} it was saved with")
    state_checksum.check_checksum(state)
    differing = states.differences(state, {**identity(config), "version": state.get("version")})
    loaded = _unpacked(state, config.trust_state)
    sampler = loaded["sampler"]
    saved = resume_kind(sampler)
    is_by_worker = saved == DATASET or has_own_states(loaded["workers"])
    if is_by_worker and loaded["num_workers"] != config.total_workers and not state["is_finished"]:
        differing.append(f"num_workers: saved {loaded['num_workers']!r}, now {config.total_workers!r}")
    possible = _resume_kinds_now(config)
    if saved not in possible:
        differing.append(f"order: saved {saved}, now {' or '.join(possible)}")
    if differing:
        raise StateMismatch(
            f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader with the saved values, or "
            "start a new run without this state"
        )
    return loaded


def resume_kind(sampler: SamplerState) -> str:
    """Return how a pass is resumed whose sampler has this state: OWN, SAMPLER or DATASET."""
    return OWN if "own" in sampler else SAMPLER if {"origin", "seed_between"} <= sampler.keys() else DATASET


def _resume_kinds_now(config: LoaderConfig) -> list[str]:
    """Return the ways in which a pass of this loader may be resumed: a sampler's iterator may turn out to have a state."""
    sampler = config.index_sampler
    if is_endless(sampler):
        return [DATASET]
    if is_torchs_own(sampler):
        return [SAMPLER]
    return [OWN] if own_state(sampler) is not None else [SAMPLER, OWN]


def _unpacked(state: Mapping[str, Any], is_trusted: bool) -> TorchState:
    """Return a state with its details beside the other fields.

    Raises:
        StateMismatch: `packed_state` did not make it, or it contains a pickle and is not trusted.
    """
    try:
        loaded: TorchState = {**state, **opened(state["details"], is_trusted=is_trusted)}
    except StateMismatch:
        raise
    except Exception as error:  # a pickle that is trusted may raise anything
        raise StateMismatch(f"the state's details cannot be read: {error!r}. Load what state_dict() returned") from error
    del loaded["details"], loaded[CHECK]
    found = {name: value for name, value in loaded.items() if name not in _IDENTITY}
    faults = states.faults_in(found, _KINDS, optional=_OPTIONAL, signed=("last_worker", "base_seed", "shared_seed"))
    if not faults:
        sampler = loaded["sampler"]
        is_sampler = all(isinstance(sampler[name], _OF_SAMPLER.get(name, ())) for name in sampler)
        if not is_sampler or ("taken" not in sampler and not loaded["is_finished"]):
            faults.append(f"sampler has {sorted(sampler)}")
        faults += [
            f"{name} has items of a wrong type"
            for name in _LISTS
            if {type(each) for each in loaded.get(name, ())} - {dict if name == "workers" else int}
        ]
    if faults:
        raise StateMismatch(
            f"this is not a valid state of a loader in torch mode: {'; '.join(faults)}. Load what state_dict() returned"
        )
    return loaded
