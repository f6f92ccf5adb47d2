"""The epochs of a user's sampler in seed mode: the sampler chooses the samples, the seed determines the randomness within them.

Such an epoch has no formula, so a state records how the sampler reached its position (see sampler_reader.py). Its size depends on
the sampler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig
from shmload.errors import StateMismatch
from shmload.modes.draw_origin import Origin, origin_of
from shmload.modes.sampler_reader import SamplerReader, state_before
from shmload.modes.sampler_start import SamplerStart
from shmload.modes.torch_samplers import described, own_generator
from shmload.schedule import state as states
from shmload.schedule import state_checksum
from shmload.schedule.state import STATE_VERSION
from shmload.schedule.state_codec import UsersOwn, opened, sealed
from shmload.worker.sample_rng import generators_kept

MODE = "seed, with a sampler"


@dataclass
class _SamplerPass:
    """One pass over the sampler: its batches from step `first` on, of which `given` have been ordered ahead."""

    batches: SamplerReader
    first: int
    given: deque[Any]

    def keys(self, step: int) -> Any:
        """Return the keys of a batch, or None after the last batch."""
        if step - self.first < len(self.given):  # its order was abandoned
            return self.given[step - self.first]
        keys = next(self.batches, None)
        if keys is not None:
            self.given.append(keys)
        return keys

    def reached(self, step: int) -> None:
        """Drop the batches before that step."""
        while self.given and self.first < step:
            self.given.popleft()
            self.first += 1
        self.batches.forget(step)


class SampledEpochs:
    """The batches of a sampler or batch sampler, epoch by epoch. Each epoch starts the sampler again; it only goes forward.

    Args:
        config: the loader's arguments.
    Attributes:
        config: those for the newest pass.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self.config = config
        self._sampler, self._auto_collation = config.index_sampler, config.auto_collation
        self._passes: dict[int, _SamplerPass] = {}  # by epoch
        self._loaded_at: tuple[int, int] | None = None  # the next pass continues from there
        self._loaded: dict[str, Any] = {}  # the sampler's state there

    @property
    def _identity(self) -> dict[str, Any]:
        """Return the fields that identify what the loader reads. The size of batches is one, because a position counts batches."""
        config = self.config
        return {
            "version": STATE_VERSION,
            "mode": MODE,
            "seed": config.seed or 0,
            "n": config.num_samples,
            "batch_size": config.batch_size,
            "drop_last": bool(config.drop_last),
            "index_sampler": described(self._sampler),
        }

    def order(self, epoch: int, step: int) -> Order | None:
        """Return the order for a batch, or None after the epoch's last batch."""
        sampler_pass = self._passes.get(epoch)
        if sampler_pass is None or not sampler_pass.first <= step <= sampler_pass.first + len(sampler_pass.given):
            sampler_pass = self._passes[epoch] = _SamplerPass(self._from(epoch, step), step, deque())
        keys = sampler_pass.keys(step)
        if keys is None:
            return None
        if not self._auto_collation:
            return Order(epoch, step, [keys])
        return Order(epoch, step, keys, is_samplers_object=not sampler_pass.batches.is_sliced)

    def reached(self, epoch: int, step: int) -> None:
        """Drop the epoch's batches before that step."""
        if epoch in self._passes:
            self._passes[epoch].reached(step)

    def keep(self, epochs: set[int]) -> None:
        """Drop the batches of all other epochs."""
        self._passes = {epoch: sampler_pass for epoch, sampler_pass in self._passes.items() if epoch in epochs}

    def _origin(self) -> Origin:
        return origin_of(None, own_generator(self._sampler, None))

    def _from(self, epoch: int, step: int) -> SamplerReader:
        is_loaded = self._loaded_at == (epoch, step)
        start = SamplerStart(self._sampler, None, is_resumed=is_loaded)
        with generators_kept() if is_loaded else nullcontext():  # a sampler may draw when it is begun
            batches = SamplerReader(
                self._sampler,
                None,
                every=1,
                iterator=iter(self._sampler),
                start=start,
                seed_between=False,
                auto_collation=self._auto_collation,
            )
        if is_loaded:
            if "own" in self._loaded and not self._loaded["taken"]:
                batches.start_after(self._loaded)  # it may be at the end of its last pass
            else:
                batches.resume(self._loaded)
            step -= batches.num_taken
        next(islice(batches, step, step), None)
        return batches

    def state_dict(self, epoch: int, step: int, *, is_begun: bool) -> dict[str, Any]:
        """Return the state before the next batch to be delivered.

        Args:
            epoch, step: position of the batch.
            is_begun: whether the pass that it belongs to has begun.
        """
        if is_begun and epoch in self._passes:
            sampler = self._passes[epoch].batches.state(step)
        elif self._loaded_at == (epoch, step):
            sampler = self._loaded
        else:
            sampler = state_before(self._sampler, self._origin())
        if "own" in sampler:
            sampler = {**sampler, "own": UsersOwn(sampler["own"])}
        return state_checksum.with_checksum({**self._identity, "epoch": epoch, "step": step, "sampler": sealed(sampler)})

    def load_state_dict(self, state: Any, *, is_trusted: bool) -> tuple[int, int]:
        """Move to the position where a state was taken, and return it as (epoch, step).

        Args:
            state: a result of `state_dict`.
            is_trusted: whether pickles in it may be opened.
        Raises:
            StateMismatch: it comes from another kind of loader or seed, is damaged, or contains a pickle that is not trusted.
        """
        saved = state if isinstance(state, Mapping) else {}
        if differing := states.differences(saved, self._identity):
            what = "; ".join(differing)
            raise StateMismatch(f"the state belongs to another loader: {what}. Remedy: build the loader as it was at saving")
        state_checksum.check_checksum(saved)
        try:
            sampler = opened(saved["sampler"], is_trusted=is_trusted)
            is_place = all(type(saved[name]) is int and saved[name] >= 0 for name in ("epoch", "step"))
            if not is_place or type(sampler["taken"]) is not int or not ("own" in sampler or "origin" in sampler):
                raise ValueError(f"it has {sorted(sampler)} at {saved['epoch']!r}, {saved['step']!r}")
        except StateMismatch:
            raise
        except Exception as error:  # a pickle that is trusted may raise anything
            raise StateMismatch(f"the state cannot be read: {error!r}. Load what state_dict() returned") from error
        self._loaded_at, self._loaded, self._passes = (saved["epoch"], saved["step"]), sampler, {}
        return self._loaded_at
