"""Seed mode with a sampler of the user's: the sampler orders, the seed keys the randomness within samples.

Such an order has no formula, so a state says how the sampler came to it (torch_order.py) and is as large as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from shmload.errors import StateMismatch
from shmload.schedule.codec import UsersOwn, opened, sealed
from shmload.schedule.state import STATE_VERSION, check_checksum, with_checksum
from shmload.torch_order import SamplerReader, is_torchs_own, own_state
from shmload.worker.generators import origin_of
from shmload.worker.sample_rng import kept_generators

MODE = "seed, with a sampler"


class SampledOrder:
    """The batches of a sampler or batch sampler, epoch by epoch. It is begun anew for each epoch and can only go forward."""

    def __init__(self, index_sampler: Any, seed: int) -> None:
        self._sampler = index_sampler
        self._seed = seed
        self._now: tuple[int, int, SamplerReader] | None = None  # epoch, next step, the batches from there
        self._loaded: dict[str, Any] = {}  # the state that the next pass goes on from

    def keys(self, epoch: int, step: int) -> Any:
        """What the sampler says for that batch; None beyond the epoch's last."""
        if self._now is None or self._now[:2] != (epoch, step):
            batches = self._from(epoch, step)
        else:
            batches = self._now[2]
        keys = next(batches, None)
        self._now = (epoch, step + (keys is not None), batches)  # asked for its end again, it must not begin anew
        return keys

    def _is_loaded(self, epoch: int, step: int) -> bool:
        return bool(self._loaded) and (self._loaded["epoch"], self._loaded["step"]) == (epoch, step)

    def _from(self, epoch: int, step: int) -> SamplerReader:
        origin, is_loaded = origin_of(None), self._is_loaded(epoch, step)
        with kept_generators() if is_loaded else nullcontext():  # a sampler may draw when it is begun
            batches = SamplerReader(
                self._sampler, None, every=1, iterator=iter(self._sampler), origin=origin, is_seed_between=False
            )
        if is_loaded:
            told = self._loaded["sampler"]
            if "own" in told and not told["taken"]:
                batches.start_after(told)  # it may be at the end of its last pass
            else:
                batches.resume(told)
            step -= batches.num_taken
        next(islice(batches, step, step), None)
        return batches

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """The state before that batch, which is the next to be delivered."""
        if self._now is not None and self._now[0] == epoch:
            sampler = self._now[2].state(step)
        elif self._is_loaded(epoch, step):
            sampler = self._loaded["sampler"]
        else:
            origin = origin_of(None).dumps(is_torchs_own(self._sampler))
            sampler = {"taken": 0, "origin": origin, "seed_between": False}
            if (own := own_state(self._sampler)) is not None:
                sampler["own"] = own
        return with_checksum(
            {
                "version": STATE_VERSION,
                "mode": MODE,
                "seed": self._seed,
                "epoch": epoch,
                "step": step,
                "sampler": sealed({**sampler, "own": UsersOwn(sampler["own"])} if "own" in sampler else sampler),
            }
        )

    def load_state_dict(self, state: Any, *, is_trusted: bool) -> tuple[int, int]:
        """Goes to where a state was taken: (epoch, step).

        Args:
            is_trusted: pickles in it may be opened.
        Raises:
            StateMismatch: it was taken of another kind of loader, or of another seed, or is damaged, or holds a pickle.
        """
        saved = state if isinstance(state, Mapping) else {}
        identity = {"version": STATE_VERSION, "mode": MODE, "seed": self._seed}
        differing = [
            f"{name}: saved {saved.get(name)!r}, now {now!r}"
            for name, now in identity.items()
            if saved.get(name) != now
        ]
        if differing:
            raise StateMismatch(
                f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader as it was at saving"
            )
        check_checksum(saved)
        try:
            sampler = opened(saved["sampler"], is_trusted=is_trusted)
            is_place = all(type(saved[name]) is int and saved[name] >= 0 for name in ("epoch", "step"))
            if not is_place or type(sampler["taken"]) is not int or not ("own" in sampler or "origin" in sampler):
                raise ValueError(f"it has {sorted(sampler)} at {saved['epoch']!r}, {saved['step']!r}")
        except StateMismatch:
            raise
        except Exception as error:  # a pickle that is trusted may raise anything
            raise StateMismatch(f"the state cannot be read: {error!r}. Load what state_dict() returned") from error
        self._loaded, self._now = {**saved, "sampler": sampler}, None
        return saved["epoch"], saved["step"]
