"""The soak: read one stream for a long time while killing workers, keeping batches, abandoning epochs and replacing loaders.

    python -m tests.faults.soak --minutes 20 [--seed N]

Every batch is compared with the pure schedule and the dataset's samples. The stream continues from loader to loader only by its
state, with different numbers of workers, start methods and ways of reading. Memory and descriptors are measured between loaders and
must not grow. The printed seed reproduces every decision, but not the row at which a worker was killed. The last line is the result
as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import warnings
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil
import torch

from shmload import Schedule, ShmLoader
from shmload.shm.names import SHM_DIR, process_stem
from shmload.worker import template
from shmload.worker.sample_rng import begin_sample, end_samples, generators_kept
from tests.faults.faults_kit import COLLATE, DATASETS, WorkerKiller, digest

NUM_SAMPLES, BATCH, SEED = 1000, 8, 17
KINDS = ("rows", "texts", "in place")
METHODS = ("fork",) * 7 + ("forkserver",)  # a spawned worker takes longer to start than the others take for all their work
WORK = 300  # per sample, enough that a worker is usually at one
HELD_MAX = 6
SETTLED = 0.2  # fraction of the run after which memory must be flat, because allocators grow at first
SLOPE_MAX_MIB = 0.5  # per minute


@dataclass
class Tally:
    """Counters of the run so far."""

    seed: int
    minutes: float = 0.0
    loaders: int = 0
    batches: int = 0
    kills: int = 0
    kills_holding: int = 0
    restarts: int = 0
    held: int = 0
    breaks: int = 0
    round_trips: int = 0
    differences: int = 0
    memory_mib: list[tuple[float, float]] = field(default_factory=list)  # (minutes, PSS of the trainer)
    descriptors: list[int] = field(default_factory=list)

    @property
    def slope_mib(self) -> float:
        """Returns the growth of memory in MiB per minute after the start, by least squares."""
        settled = [(at, mib) for at, mib in self.memory_mib if at >= SETTLED * self.minutes]
        if len(settled) < 3:
            return 0.0
        at, mib = np.array(settled).T
        return float(np.polyfit(at, mib, 1)[0])

    def result(self) -> dict[str, Any]:
        """Returns the values of the last line."""
        whole = asdict(self)
        memory, descriptors = whole.pop("memory_mib"), whole.pop("descriptors")
        return {
            **whole,
            "memory_first_mib": round(memory[0][1], 1),
            "memory_last_mib": round(memory[-1][1], 1),
            "memory_slope_mib_a_minute": round(self.slope_mib, 3),
            "descriptors_least": min(descriptors[1:] or descriptors),
            "descriptors_most": max(descriptors),
        }


class Stream:
    """The position in the stream and the expected next batch, computed without a loader."""

    def __init__(self) -> None:
        self.epoch, self.step = 0, 0
        self._schedule = Schedule(NUM_SAMPLES, batch_size=BATCH, seed=SEED, shuffle=True)

    def expected(self, kind: str) -> str:
        """Returns the digest of the next batch."""
        dataset = DATASETS[kind](NUM_SAMPLES)
        indices = self._schedule.batch(self.epoch, self.step, 0).tolist()
        with generators_kept():
            samples = [self._sample(dataset, index) for index in indices]
        if kind in COLLATE:
            return digest(COLLATE[kind](samples))
        names = dataset.schema if kind == "in place" else samples[0]
        return digest({name: torch.utils.data.default_collate([sample[name] for sample in samples]) for name in names})

    def _sample(self, dataset: Any, index: int) -> Any:
        begin_sample(SEED, self.epoch, index, 0, reseed=True)
        try:
            return dataset[index]
        finally:
            end_samples()

    @property
    def is_at_end(self) -> bool:
        """Returns whether the epoch is finished."""
        return self.step == self._schedule.num_steps

    def next_epoch(self) -> None:
        """Moves to the start of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0


class Soak:
    """Runs loaders one after the other over one stream."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally(seed)
        self._stream = Stream()
        self._state: str | None = None
        self._held: list[tuple[Any, str]] = []
        self._began = monotonic()
        self.findings: list[str] = []

    def one_loader(self) -> None:
        """Runs a loader for some hundreds of batches from where the last one stopped."""
        tally = self.tally
        rng = random.Random(f"{tally.seed} {tally.loaders}")
        kind, method, num_workers = rng.choice(KINDS), rng.choice(METHODS), rng.randint(1, 4)
        loader = ShmLoader(
            DATASETS[kind](NUM_SAMPLES, WORK),
            batch_size=BATCH,
            shuffle=True,
            seed=SEED,
            num_workers=num_workers,
            collate_fn=COLLATE.get(kind),
            multiprocessing_context=method,
            prefetch_factor=rng.randint(1, 3),
        )
        tally.loaders += 1
        with loader:
            if self._state is not None:
                loader.load_state_dict(json.loads(self._state))
            num_left = rng.randint(50, 300)
            killer = None
            while num_left > 0:
                if self._stream.is_at_end:  # a state taken here is the start of the next epoch
                    self._stream.next_epoch()
                batches = iter(loader)
                while num_left > 0:
                    if self._stream.is_at_end:
                        if next(batches, None) is not None:
                            self._differs("one batch too many")
                        self._stream.next_epoch()
                        break
                    self._take(next(batches), kind, rng)
                    num_left -= 1
                    killer = killer or WorkerKiller(loader._builder.last)
                    if rng.random() < 0.15:
                        killer.kill_one(random.Random(rng.getrandbits(64)))
                    what = rng.random()
                    if what < 0.01:
                        tally.breaks += 1
                        self._stream.next_epoch()
                        break
                    if what < 0.03:
                        tally.round_trips += 1
                        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
                        break
                del batches
            # abandoning on the very last batch leaves the loader in that epoch, while the stream is in the next
            loader.set_epoch(self._stream.epoch) if self._stream.step == 0 else None
            self._state = json.dumps(loader.state_dict())
            if killer is not None:
                tally.kills += killer.num_kills
                tally.kills_holding += killer.num_holding
            tally.restarts += loader.stats()["num_restarts"]
        self._measure()

    def _take(self, batch: Any, kind: str, rng: random.Random) -> None:
        tally, stream = self.tally, self._stream
        got = digest(batch)
        if got != stream.expected(kind):
            self._differs(f"batch {stream.step} of epoch {stream.epoch}, {kind}")
        stream.step += 1
        tally.batches += 1
        if rng.random() < 0.1:
            self._held.append((batch, got))
            tally.held += 1
        while len(self._held) > HELD_MAX or (self._held and rng.random() < 0.1):
            held, was = self._held.pop(rng.randrange(len(self._held)))
            if digest(held) != was:
                self._differs("a kept batch")

    def _differs(self, what: str) -> None:
        self.tally.differences += 1
        self.findings.append(what)

    def _measure(self) -> None:
        """Measures memory and descriptors while neither a loader nor a batch exists."""
        self._held.clear()
        tally = self.tally
        tally.minutes = (monotonic() - self._began) / 60
        rollup = Path("/proc/self/smaps_rollup").read_text()
        pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        tally.memory_mib.append((tally.minutes, pss_kib / 1024))
        tally.descriptors.append(psutil.Process().num_fds())

    def problems(self) -> list[str]:
        """Returns every broken promise."""
        tally = self.tally
        found = list(self.findings)
        if len(set(tally.descriptors[1:])) > 1:  # the first loader creates what lives as long as the process
            found.append(f"descriptors are not flat: {tally.descriptors}")
        if tally.minutes > 2 and tally.slope_mib > SLOPE_MAX_MIB:
            found.append(f"memory grows by {tally.slope_mib:.2f} MiB a minute")
        found += [f"a name is left: {name}" for name in os.listdir(SHM_DIR) if process_stem() in name]
        helpers = {resource_tracker._resource_tracker._pid}
        helpers |= {template._current and template._current.process.pid}
        children = psutil.Process().children()
        found += [f"a process survived: {child.cmdline()}" for child in children if child.pid not in helpers]
        return found


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="duration; the last loader is finished")
    parser.add_argument("--seed", type=int, default=None, help="seed of all decisions; by default a random one, which is printed")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("shmload").setLevel(logging.ERROR)  # it logs every kill
    warnings.filterwarnings("ignore", message=".*batches are still in use")  # part of the test
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # there may be fewer cores than workers
    forkserver.set_forkserver_preload(["torch", "tests.faults.faults_kit"])
    template.template_for("forkserver")  # its descriptors stay open
    soak = Soak(seed)
    until = monotonic() + given.minutes * 60
    reported = monotonic()
    while monotonic() < until:
        soak.one_loader()
        if monotonic() - reported > 60:
            reported = monotonic()
            tally = soak.tally
            print(
                f"{tally.minutes:5.1f} min: {tally.batches} batches, {tally.kills} kills, {tally.differences} differences, "
                f"{tally.memory_mib[-1][1]:.0f} MiB, {tally.descriptors[-1]} descriptors",
                flush=True,
            )
    found, tally = soak.problems(), soak.tally
    print(
        f"{tally.kills} kills survived ({tally.kills_holding} of workers that held rows), {tally.batches} batches by {tally.loaders} "
        f"loaders, {tally.breaks} epochs abandoned, {tally.round_trips + tally.loaders - 1} states loaded, {tally.held} batches "
        f"held; {tally.differences} differences; memory {tally.slope_mib:+.2f} MiB a minute, "
        f"descriptors {min(tally.descriptors)} to {max(tally.descriptors)}"
    )
    for one in found:
        print(f"BROKEN: {one}")
    print(json.dumps({**tally.result(), "found": found}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
