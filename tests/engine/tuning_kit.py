"""A random dataset with its expected batches, and a simulated pipeline, for the tests of autotune."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmload import ShmLoader
from shmload.engine.engine import Engine
from shmload.engine.tuning.tuning_decision import Decision, Limits, RateWindow, Setting, TuningHistory, decide

N, BATCH, SEED = 60, 4, 11


class Rows:
    """Samples with fixed rows that contain the index and random numbers."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"i": index, "r": random.random(), "t": torch.rand(3), "x": np.full(50, index)}


def values_of(batch: dict[str, Any]) -> Any:
    """Returns a batch as values that can be compared."""
    return {name: value.tolist() for name, value in batch.items()}


def expected_epochs(count: int) -> list[list[Any]]:
    """Returns the batches of some epochs, read in this process."""
    with ShmLoader(Rows(), batch_size=BATCH, shuffle=True, seed=SEED) as loader:
        return [[values_of(batch) for batch in loader] for _ in range(count)]


def engine_of(loader: ShmLoader[Any]) -> Engine:
    """Returns the engine of a loader that has begun a pass."""
    engine = loader._builder.last
    assert engine is not None
    return engine


def change(loader: ShmLoader[Any], num_workers: int, prefetch: int = 2) -> None:
    """Makes a running loader change as if its controller had decided it."""
    engine = engine_of(loader)
    assert loader._builder.tuner is not None
    loader._builder.tuner._change(engine, Decision(Setting(num_workers, prefetch), "a test wants it"))
    engine.worker_set.make_room(loader._builder.tuner.num_ahead, 1 << 40)


class Pipeline:
    """A simulation of a trainer and its workers; each worker reads one batch after the other, in order.

    Args:
        step_s, work_s: time that a batch takes in the trainer and in a worker, by the simulated time.
        num_cpus: more workers than this slow each other down.
        burst: fraction of batches that take ten times as long.
    """

    def __init__(
        self,
        step_s: Callable[[float], float],
        work_s: Callable[[float], float],
        *,
        setting: Setting,
        most: Setting,
        seed: int = 0,
        num_cpus: int = 1000,
        room: int = 128,
        burst: float = 0.0,
        start_s: float = 0.2,
    ) -> None:
        self._step_s, self._work_s = step_s, work_s
        self.setting = setting
        least = Setting(1, 1 if most.prefetch > setting.prefetch else setting.prefetch)
        self.limits = Limits(least, most, 128, room, start_s)
        self.memory = TuningHistory()
        self.decisions: list[tuple[float, Decision]] = []
        self._rng = random.Random(seed)
        self._num_cpus, self._burst = num_cpus, burst
        self._now = 0.0
        self._free = [0.0] * setting.num_workers  # when each worker becomes free
        self._done: list[float] = []  # when each batch is ready, from the first on
        self.num_delivered = 0

    def _order(self) -> float:
        """Gives another batch to the worker that is free first. Returns its duration."""
        worker = min(range(len(self._free)), key=self._free.__getitem__)
        took = self._work_s(self._now) * self._rng.lognormvariate(-0.045, 0.3)
        took *= 10 if self._rng.random() < self._burst else 1
        took *= max(1.0, len(self._free) / self._num_cpus)
        self._free[worker] = max(self._free[worker], self._now) + took
        self._done.append(self._free[worker])
        return took

    def run(self, until_s: float) -> None:
        """Simulates until this time, window by window."""
        while self._now < until_s:
            began, wait_s, busy_s, num_batches = self._now, 0.0, 0.0, 0
            while self._now - began < 0.5 or num_batches < 8:
                while len(self._done) < self.num_delivered + self.setting.num_ahead:
                    busy_s += self._order()
                waits = max(self._done[self.num_delivered] - self._now, 0.0)
                wait_s += waits
                self._now += waits + self._step_s(self._now) * self._rng.lognormvariate(-0.005, 0.1)
                self.num_delivered += 1
                num_batches += 1
            seconds = self._now - began
            window = RateWindow(seconds, wait_s, min(busy_s, seconds * self.setting.num_workers), num_batches)
            self.memory, decision = decide(self.setting, self.memory, window, self.limits)
            if decision is not None:
                self._change(decision)

    def _change(self, decision: Decision) -> None:
        self.decisions.append((self._now, decision))
        self.setting = decision.setting
        self._free = sorted(self._free)[: self.setting.num_workers]
        self._free += [self._now + self.limits.start_s] * (self.setting.num_workers - len(self._free))
