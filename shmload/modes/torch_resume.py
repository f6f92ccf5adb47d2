"""Resume a pass in torch mode: start the sampler and the workers where a state was taken; decide whether to read batches again."""

from __future__ import annotations

import logging

from shmload.modes.sampler_reader import SamplerReader
from shmload.modes.torch_state import DATASET, TorchState, has_own_states, resume_kind
from shmload.shm import pickling

log = logging.getLogger("shmload")


def start_sampler(reader: SamplerReader, state: TorchState | None, *, is_early: bool) -> TorchState | None:
    """Start a sampler's reader where a state was taken. Return the state if it was taken within a pass, else None.

    Args:
        reader: the reader of the new pass.
        state: the saved state; None to begin a pass from its start.
        is_early: take the first batch at once, because some samplers use a generator only then.
    """
    if state is None:
        return None
    if state["is_finished"]:
        reader.start_after(state["sampler"])
        return None
    taken = state["sampler"]["taken"]
    reader.resume(state["sampler"], max(state.get("ahead", taken) - taken, int(is_early)))
    return state


def resume_bytes(state: TorchState | None, num_workers: int) -> list[bytes]:
    """Return the workers' pickled snapshots from which they continue, or [] if there are none or they cannot be used."""
    if state is None:
        return []
    if state["num_workers"] != num_workers and any(state["workers"]):
        log.warning(
            "the state was saved with %d workers and is resumed with %d: the order continues, the workers' random streams do not",
            state["num_workers"],
            num_workers,
        )
    if state["num_workers"] != num_workers or (fast_forward(state) and state["version"] < 2):
        return []
    return [pickling.dumps(snapshot) if snapshot else b"" for snapshot in state["workers"]]


def fast_forward(state: TorchState) -> str:
    """Return why the pass must be read again up to the state, or an empty string if that is not needed."""
    is_iterable = resume_kind(state["sampler"]) == DATASET
    if not is_iterable or has_own_states(state["workers"]) or state["is_finished"] or not sum(state["counts"]):
        return ""
    return (
        f"the state has no state of the iterable dataset or its iterator: the first {state['position']} batches are read again to "
        "reach its position. Give one of them state_dict and load_state_dict, with a snapshot_every_n_steps of at least 1"
    )
