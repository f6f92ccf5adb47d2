"""What a sampler was when a pass over it was about to begin.

A resumed pass begins its sampler twice: torch's iterator begins it, and then it begins again with the generators of the saved
run. A sampler that counts its passes in `__iter__` must see only one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Generator

from shmload.modes.draw_origin import origin_of
from shmload.modes.torch_samplers import innermost, is_torchs_own, own_generator
from shmload.worker.own_generators import OwnGenerators


class SamplerStart:
    """The start of a pass; create it before the sampler's `__iter__` is called.

    Args:
        index_sampler: the loader's index sampler.
        generator: the loader's own generator, if it has one.
        is_resumed: whether the pass is resumed, so that `undo` may be called.

    Attributes:
        origin: the generators' states.
        epoch: the attribute of this name of the sampler, or of the one within a batch sampler; None if it has none.
    """

    def __init__(self, index_sampler: Any, generator: Generator | None, *, is_resumed: bool) -> None:
        self.origin = origin_of(generator, own_generator(index_sampler, generator))
        inner = innermost(index_sampler)
        self.epoch = getattr(inner, "epoch", None)
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # (an object's, a copy)
        self._restore_generators: Callable[[], None] | None = None
        if is_resumed and not is_torchs_own(index_sampler):
            self._attributes = [(vars(each), dict(vars(each))) for each in (index_sampler, inner) if hasattr(each, "__dict__")]
            self._restore_generators = OwnGenerators(index_sampler).present()

    def undo(self) -> None:
        """Give the sampler the attributes, and its own generators the states, from before `__iter__` was called."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        if self._restore_generators is not None:
            self._restore_generators()
