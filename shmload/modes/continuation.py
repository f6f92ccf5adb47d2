"""Continue the trainer's generators where a saved run left them, without moving the program's own.

A resumed pass draws its samples from generators set to their states in the saved run, and the program's generators are restored
afterwards. If the program then neither draws from a generator nor seeds it, the saved run would not have done so either. The next
pass then draws from where the resumed one stopped. A generator that the program has used or set since is used as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shmload.modes.draw_origin import GENERATORS, Origin, origin_of, replayed

Marks = dict[str, int]  # name of a global generator -> checksum of its state


class Continuation:
    """The place of each global generator in the saved run, while the program leaves that generator alone."""

    def __init__(self) -> None:
        self._left: Origin | None = None  # the states of the program's generators when the newest pass had begun
        self._place: Origin | None = None  # the states of the saved run's generators at that time

    def keep(self, place: Origin) -> None:
        """Let later passes draw from `place`, as long as the program does not change its generators."""
        self._left, self._place = origin_of(None), place

    def forget(self) -> None:
        """Let later passes draw from the program's generators."""
        self._left = self._place = None

    def place(self, generator: torch.Generator | None) -> Origin:
        """Return the generators' states from which the next pass draws.

        Args:
            generator: the loader's own generator, which is always used as it is.
        """
        now = origin_of(generator)
        if self._place is None or self._left is None:
            return now
        return now.replaced(self._place, [name for name in GENERATORS if now.is_same(self._left, name)])

    @contextmanager
    def drawing(self, generator: torch.Generator | None) -> Iterator[bool]:
        """Let a pass draw from the kept place within the block. Yield whether the program's generators are restored afterwards."""
        if self._place is None:
            yield False
            return
        with self.drawing_from(self.place(generator)) as is_restored:
            yield is_restored

    @contextmanager
    def drawing_from(self, place: Origin) -> Iterator[bool]:
        """Let a pass draw from `place` within the block. Yield whether the program's generators are restored afterwards."""
        if place.is_now():
            self.forget()
            yield False
            return
        with replayed(place, None):
            yield True
            place = origin_of(None)
        self.keep(place)

    def marks(self, *, is_torch_enough: bool) -> Marks:
        """Return a checksum of each generator's place, which shows later whether a program has restored it.

        Args:
            is_torch_enough: leave out Python's and numpy's generators. This takes about 5 us instead of 60.
        """
        if is_torch_enough and self._place is None:
            return {"of_torch": zlib.crc32(torch.get_rng_state().numpy().data)}
        marks = marks_of(self.place(None))
        return {"of_torch": marks["of_torch"]} if is_torch_enough else marks


def marks_of(origin: Origin) -> Marks:
    """Return a checksum of each global generator's state."""
    return {name: zlib.crc32(origin.bytes_of(name)) for name in GENERATORS}


def restored(saved: Mapping[str, Any]) -> set[str]:
    """Return the names of the generators that are in the states whose marks were saved.

    Args:
        saved: a result of `Continuation.marks`.
    """
    now = marks_of(origin_of(None))
    return {name for name in saved if saved[name] == now.get(name)}
