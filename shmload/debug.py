"""For finding faults: who holds batches, what was read after its batch had died, and which copies come too late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmload.engine.parts import CopyWatch, Holder, Watched, enable, is_enabled

__all__ = ["Holder", "enable", "is_enabled", "is_poisoned", "watch_copies"]

POISON = 0xA5  # src/lease.h writes it


def is_poisoned(values: Any) -> bool:
    """Whether every byte is what a slot is overwritten with: then this was read after its batch had died.

    Args:
        values: a tensor or array; an empty one is not poisoned. Tensors of a device are copied.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return len(raw) > 0 and bool((raw == POISON).all())


@contextlib.contextmanager
def watch_copies(loader: Any) -> Iterator[None]:
    """Warns of copies from a pinned ring that may read too late: on a stream that nobody waits for, or captured in a graph.

    Around a training loop, or any part of it; it switches `enable()` on as well, for workers started in the block. It sees what
    torch is asked to copy in this thread. A copy is late if its slot is about to be used again and the copy is not done: what a
    stream waited for, in whatever way, is not. One that was done in time by luck is not found, so let the watch run for a while.

    Args:
        loader: a ShmLoader with `pin_memory=True`, and no pass begun before the block.
    Raises:
        RuntimeError: a pass began before, unwatched.
    Cost: an event a copy, and a Python call for everything that torch is asked for: for finding faults, not for every day.
    Example:
        >>> from shmload import ShmLoader, debug
        >>> with ShmLoader([1, 2, 3]) as loader, debug.watch_copies(loader):
        ...     [int(batch) for batch in loader]
        [1, 2, 3]
    """
    if any(engine.holders is None and not engine._is_closed for engine in loader._builder.engines):
        raise RuntimeError(
            "watch_copies needs a loader whose workers start in its block, and these run already: make the loader, or "
            "begin its first pass, in the block, or set SHMLOAD_DEBUG_BATCHES=1"
        )

    def watched() -> Iterator[Watched]:
        for engine in loader._builder.engines:
            if engine._pending_copies is not None and engine.holders is not None:
                yield Watched(engine._options.calls, engine._pending_copies, engine.holders.batch_in)

    was_enabled = is_enabled()
    enable()
    try:
        with CopyWatch(watched):
            yield
    finally:
        enable(was_enabled)
