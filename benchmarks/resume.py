"""Measure the cost of saving a position, of resuming from it, and of the reseeding that makes samples repeatable.

Method: A fresh start and a resume are timed from the creation of the loader, including loading a state, to its first batch: 256
indices of a dataset of 10^10 (seed mode) and 10^7 (torch mode, compared with torchdata's StatefulDataLoader), shuffled, one
forked worker. It would take too long to read nine million samples for a state. Instead, each state is the loader's first state
with its counts increased, and the benchmark fails if a loader's first batch is not that of the position. Each case runs in a
fresh process, which starts a small loader of the same kind before the clock starts. Cases take turns, and ratios are of one
round. In seed mode, where a start takes milliseconds, the figure is the best of five.

state_dict() is timed once after each of 200 batches, with two workers; the figure is the median. Reseeding is the additional
CPU of a sample that draws nothing, compared with seed_samples=False, in turn, the best of five: random, numpy and torch are
seeded before each sample. It is compared with seeding by their public functions.

How to read: A position in a formula is reached at no cost, so a resume should cost as much as a start. In torch mode the order
is torch's own permutation, which must be drawn (for every loader, that is most of the time); torchdata then counts up to the
position.

Predicted: 10 us for state_dict(), 1.0x for a resume, 15 us for reseeding.

Result (2 cores, other work on the machine):
| | |
|---|---|
| state_dict(), seed mode | 1.4 us, 154 bytes |
| state_dict(), torch mode | 6.3 us, 3739 bytes |
| resume at 10^9 of 10^10 over a fresh start, seed mode | 0.83x (16 ms and 20 ms) |
| resume at 9 M of 10 M, torch mode | 0.26 s, torchdata 3.95 s, fresh 0.22 s |
| seed_samples | 0.83 us; by the public functions 7.6 us (later, when everything took 1.4 times as long) |
"""

import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.common import Result, Row, Settings, fresh, in_order, main
from shmload import ShmLoader
from shmload.schedule.schedule import Schedule
from shmload.schedule.state_checksum import with_checksum
from shmload.schedule.state_codec import opened, sealed

BATCH = 256
HUGE, LARGE, SMALL = 10**10, 10**7, 10**4
FAR, LATE = 10**9 // BATCH, 9_000_000 // BATCH  # positions, in batches
NUM_STATES, NUM_STARTS, NUM_READ = 200, 5, 100_000
SEED = 3


class Numbers(Dataset[Any]):
    """A dataset whose samples are their indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def best(measure: Callable[[], float], rounds: int) -> float:
    return min(measure() for _ in range(rounds))


def call_us(call: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def seed_mode(n: int, num_workers: int = 1) -> ShmLoader[Any]:
    return ShmLoader(Numbers(n), BATCH, shuffle=True, seed=SEED, num_workers=num_workers, multiprocessing_context="fork")


def torch_mode(n: int, num_workers: int = 1) -> ShmLoader[Any]:
    return ShmLoader(Numbers(n), BATCH, shuffle=True, num_workers=num_workers, multiprocessing_context="fork")


def torchdatas(n: int, num_workers: int = 1) -> Any:
    return StatefulDataLoader(Numbers(n), BATCH, shuffle=True, num_workers=num_workers, multiprocessing_context="fork")


LOADERS: dict[str, Callable[..., Any]] = {"seed mode": seed_mode, "torch mode": torch_mode, "torchdata": torchdatas}


class Position(NamedTuple):
    """A state that was constructed, not saved by a loader, and the indices of the batch that follows it."""

    state: dict[str, Any]
    batch: list[int]


def seed_mode_position() -> Position:
    """Returns the position of seed mode after `FAR` batches."""
    with seed_mode(HUGE) as loader:
        state = with_checksum({**loader.state_dict(), "position": FAR * BATCH})
    schedule = Schedule(HUGE, batch_size=BATCH, seed=SEED, shuffle=True)
    return Position(state, schedule.batch(0, FAR, 0).tolist())


def torch_mode_position() -> Position:
    """Returns the position of torch mode after `LATE` batches. Its batch is that of torch's own sampler."""
    torch.manual_seed(SEED)
    with torch_mode(LARGE) as loader:
        next(iter(loader))
        state = loader.state_dict()
    inside = opened(state["details"], is_trusted=True)
    inside.update(snapshot=LATE, sampler={**inside["sampler"], "taken": LATE})
    torch.manual_seed(SEED)
    torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws the seed of its workers before its sampler draws
    batch = list(RandomSampler(Numbers(LARGE)))[LATE * BATCH :][:BATCH]
    return Position(with_checksum({**state, "position": LATE, "details": sealed(inside)}), batch)


def torchdata_position() -> Position:
    """Returns the position of torchdata's loader after `LATE` batches."""
    loader = torchdatas(LARGE)
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    main_state = state["_snapshot"]["_main_snapshot"]
    state["_snapshot"]["_snapshot_step"] = LATE
    main_state["_sampler_iter_yielded"] = LATE
    sampler = main_state["_sampler_iter_state"]
    sampler["samples_yielded"] = LATE * BATCH
    sampler["sampler_iter_state"]["yielded"] = LATE * BATCH
    generator = torch.Generator()
    generator.set_state(sampler["sampler_iter_state"]["generator"])
    return Position(state, torch.randperm(LARGE, generator=generator)[LATE * BATCH :][:BATCH].tolist())


POSITIONS = {"seed mode": seed_mode_position, "torch mode": torch_mode_position, "torchdata": torchdata_position}


def first_batch(make: Callable[..., Any], n: int, position: Position | None) -> float:
    """Returns the seconds from the creation of a loader, including loading a state, to its first batch.

    Raises:
        ValueError: the batch is that of another position.
    """
    began = time.perf_counter()
    loader = make(n)
    if position is not None:
        loader.load_state_dict(position.state)
    batch = next(iter(loader))
    took = time.perf_counter() - began
    if isinstance(loader, ShmLoader):
        loader.close()
    if position is not None and batch.tolist() != position.batch:
        raise ValueError("the batch is not that of the position")
    return took


def started(name: str, position: Position | None) -> float:
    """Returns the seconds to the first batch of a kind of loader; runs in a fresh process."""
    make = LOADERS[name]
    first_batch(make, SMALL, None)
    n, count = (HUGE, NUM_STARTS) if name == "seed mode" else (LARGE, 1)
    return best(lambda: first_batch(make, n, position), count)


def state_us(name: str) -> tuple[float, int]:
    """Returns the median time of state_dict() after a batch, and the size of the last state as JSON; runs in a fresh process."""
    loader, times = LOADERS[name](100_000, num_workers=2), []
    for _, _ in zip(range(NUM_STATES), loader, strict=False):
        began = time.perf_counter()
        state = loader.state_dict()
        times.append(time.perf_counter() - began)
    return median(times) * 1e6, len(json.dumps(state, default=lambda tensor: tensor.tolist()))


def states(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    found = {name: [] for name in LOADERS}
    for _ in range(rounds):
        for name, values in found.items():
            values.append(fresh(state_us, name))
    us = {name: median(each for each, _ in values) for name, values in found.items()}
    nbytes = {name: values[-1][1] for name, values in found.items()}
    theirs = f"torchdata {us['torchdata']:.1f} us and {nbytes['torchdata']}"
    rows = [
        Row(f"state_dict(), {name}", us[name], "us", f"{nbytes[name]} bytes as JSON; {theirs}", "<= 50 us", us[name] <= 50)
        for name in ("seed mode", "torch mode")
    ]
    return rows, found


def resumes(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    cases: dict[str, tuple[str, Position | None]] = {}
    for name, position in POSITIONS.items():
        at = "10^9 of 10^10" if name == "seed mode" else "9 M of 10 M"
        cases |= {f"{name}, fresh": (name, None), f"{name}, at {at}": (name, fresh(position))}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in in_order(cases, number):
            found[name].append(fresh(started, *cases[name]))
    middle = {name: median(values) for name, values in found.items()}

    def ratio(name: str, other: str) -> float:
        return median(a / b for a, b in zip(found[name], found[other], strict=True))

    seeded = ratio("seed mode, at 10^9 of 10^10", "seed mode, fresh")
    over = ratio("torchdata, at 9 M of 10 M", "torch mode, at 9 M of 10 M")
    rows = [
        Row(
            "resume at sample 10^9 of 10^10 over a fresh start, seed mode",
            seeded,
            "x",
            f"{middle['seed mode, at 10^9 of 10^10'] * 1e3:.0f} ms and {middle['seed mode, fresh'] * 1e3:.0f} ms",
            "<= 1.2x",
            seeded <= 1.2,
        ),
        Row(
            "resume at 9 M of 10 M, torch mode: torchdata's time over ours",
            over,
            "x",
            f"{middle['torchdata, at 9 M of 10 M']:.2f} s and {middle['torch mode, at 9 M of 10 M']:.2f} s; "
            f"fresh {middle['torchdata, fresh']:.2f} s and {middle['torch mode, fresh']:.2f} s",
            "> 1x",
            over > 1,
        ),
    ]
    return rows, found


def read_us(**options: Any) -> float:
    """Returns the CPU microseconds per sample if the sample itself costs nothing, in the process that reads it."""
    num_passes = 3
    with ShmLoader(Numbers(NUM_READ), 1000, seed=1, collate_fn=len, **options) as loader:
        began = time.process_time()
        for _ in range(num_passes):
            for _ in loader:
                pass
        return (time.process_time() - began) / num_passes / NUM_READ * 1e6


def seed_publicly() -> None:
    """Seeds the generators for one sample with their public functions."""
    random.seed(0x9E3779B97F4A7C15)
    np.random.seed(0x7F4A7C15)
    torch.default_generator.manual_seed(0x9E3779B97F4A7C15)


def measure(settings: Settings) -> Result:
    """Measures state_dict(), resumes and reseeding."""
    asked, states_found = states(settings.rounds)
    resumed, resumes_found = resumes(settings.rounds)
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    pairs = [(read_us(), read_us(seed_samples=False)) for _ in range(max(settings.rounds, NUM_STARTS))]
    us = min(with_it for with_it, _ in pairs) - min(without for _, without in pairs)
    calls_us = best(lambda: call_us(seed_publicly, 5000), settings.rounds)
    random.setstate(kept[0]), np.random.set_state(kept[1]), torch.set_rng_state(kept[2])
    beside = f"random, numpy and torch; by their public calls {calls_us:.1f} us"
    rows = [*asked, *resumed, Row("seed_samples: CPU a sample, that draws nothing", us, "us", beside, "<= 1 us", us <= 1)]
    return Result(rows, {"states": states_found, "resumes": resumes_found, "seed_samples_us": us, "calls_us": calls_us})


if __name__ == "__main__":
    main("resume", __doc__, measure)
