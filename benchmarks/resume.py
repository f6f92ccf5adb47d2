"""What does a position cost: to ask for it, to come back to it, and the reseeding that makes samples repeat?

Method: one process, each figure the best of `--rounds` (a busy machine only ever adds). Fresh start and resume are the time from
making the loader to its first batch in hand, 256 indices of a dataset of 10^10 (seed mode) and 10^7 (torch mode, beside
torchdata's StatefulDataLoader), shuffled, one forked worker. state_dict() is timed in the middle of an epoch with two workers.
Reseeding is the additional CPU of a sample that draws nothing, compared with seed_samples=False: random, numpy and torch are
seeded before each sample. It is compared with their public calls.

How to read: a position in a formula is reached at no cost, so a resume should cost as much as a start. In torch mode the order is
torch's own permutation, which must be drawn (that is most of the time for every loader); torchdata then counts up to the
position.

Predicted: 10 us, 1.0x, 15 us. Result (2 cores, other work on the machine):
| | |
|---|---|
| state_dict(), seed mode | 1.4 us, 154 bytes |
| state_dict(), torch mode | 6.3 us, 3739 bytes |
| resume at 10^9 of 10^10 over a fresh start, seed mode | 0.83x (16 ms and 20 ms) |
| resume at 9 M of 10 M, torch mode | 0.26 s, torchdata 3.95 s, fresh 0.22 s |
| seed_samples | 0.83 us; by the public calls 7.6 us (later, when everything took 1.4 times as long) |
"""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.common import Result, Row, Settings, main
from shmload import ShmLoader
from shmload.schedule.state_checksum import with_checksum
from shmload.schedule.state_codec import opened, sealed

BATCH = 256
HUGE, LARGE = 10**10, 10**7


class Numbers(Dataset[Any]):
    """A dataset of its indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def best(measure: Callable[[], float], rounds: int) -> float:
    return min(measure() for _ in range(rounds))


def first_batch_s(make: Callable[[], Any], state: Any) -> float:
    """Returns the time from the creation of the loader, including loading a state, to the first batch."""
    began = time.perf_counter()
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    next(iter(loader))
    took = time.perf_counter() - began
    if isinstance(loader, ShmLoader):
        loader.close()
    return took


def call_us(call: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def seed_mode() -> ShmLoader[Any]:
    return ShmLoader(Numbers(HUGE), BATCH, shuffle=True, seed=1, num_workers=1)


def torch_mode() -> ShmLoader[Any]:
    return ShmLoader(Numbers(LARGE), BATCH, shuffle=True, num_workers=1)


def torchdatas() -> Any:
    return StatefulDataLoader(Numbers(LARGE), BATCH, shuffle=True, num_workers=1)


def torchdata_state(position: int) -> dict[str, Any]:
    """Returns the state of torchdata's loader after `position` batches without reading them: its first state with the counts
    increased.
    """
    loader = torchdatas()
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    main_state = state["_snapshot"]["_main_snapshot"]
    state["_snapshot"]["_snapshot_step"] = position
    main_state["_sampler_iter_yielded"] = position
    sampler = main_state["_sampler_iter_state"]
    sampler["samples_yielded"] = position * BATCH
    sampler["sampler_iter_state"]["yielded"] = position * BATCH
    return state


def states(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    rows, measured = [], {}
    for name, more in {"seed mode": {"seed": 1}, "torch mode": {}}.items():
        with ShmLoader(Numbers(100_000), BATCH, shuffle=True, num_workers=2, **more) as loader:
            iterator = iter(loader)
            for _ in range(10):
                next(iterator)
            us = best(lambda: call_us(loader.state_dict, 200), rounds)  # calls in a tight loop
            nbytes = len(json.dumps(loader.state_dict()))
        measured[name] = {"state_us": us, "state_nbytes": nbytes}
        rows.append(Row(f"state_dict(), {name}", us, "us", f"{nbytes} bytes as JSON", "<= 50 us", us <= 50))
    return rows, measured


def resumes(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    with seed_mode() as loader:
        far = with_checksum({**loader.state_dict(), "position": 10**9 // BATCH * BATCH})
    position = 9_000_000 // BATCH
    with torch_mode() as loader:
        next(iter(loader))
        state = loader.state_dict()
        inside = opened(state["details"], is_trusted=True)
        inside.update(snapshot=position, sampler={**inside["sampler"], "taken": position})
        late = with_checksum({**state, "position": position, "details": sealed(inside)})
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "seed mode, fresh": (seed_mode, None),
        "seed mode, at 10^9 of 10^10": (seed_mode, far),
        "torch mode, fresh": (torch_mode, None),
        "torch mode, at 9 M of 10 M": (torch_mode, late),
        "torchdata, fresh": (torchdatas, None),
        "torchdata, at 9 M of 10 M": (torchdatas, torchdata_state(position)),
    }
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, (make, wanted) in cases.items():
            found[name] = min(found.get(name, float("inf")), first_batch_s(make, wanted))
    seeded = found["seed mode, at 10^9 of 10^10"] / found["seed mode, fresh"]
    torchs = found["torch mode, at 9 M of 10 M"]
    rows = [
        Row(
            "resume at sample 10^9 of 10^10 over a fresh start, seed mode",
            seeded,
            "x",
            f"{found['seed mode, at 10^9 of 10^10'] * 1e3:.0f} ms and {found['seed mode, fresh'] * 1e3:.0f} ms",
            "<= 1.2x",
            seeded <= 1.2,
        ),
        Row(
            "resume at 9 M of 10 M, torch mode: torchdata's time over ours",
            found["torchdata, at 9 M of 10 M"] / torchs,
            "x",
            f"{found['torchdata, at 9 M of 10 M']:.2f} s and {torchs:.2f} s; fresh {found['torch mode, fresh']:.2f} s",
            "> 1x",
            found["torchdata, at 9 M of 10 M"] > torchs,
        ),
    ]
    return rows, found


def read_us(**options: Any) -> float:
    """Returns the CPU of a sample that itself costs nothing, in the process that reads it."""
    num_passes, num_samples = 3, 100_000
    with ShmLoader(Numbers(num_samples), 1000, seed=1, collate_fn=len, **options) as loader:
        began = time.process_time()
        for _ in range(num_passes):
            for _ in loader:
                pass
        return (time.process_time() - began) / num_passes / num_samples * 1e6


def seed_publicly() -> None:
    """Seeds the generators for one sample with their public functions."""
    random.seed(0x9E3779B97F4A7C15)
    np.random.seed(0x7F4A7C15)
    torch.default_generator.manual_seed(0x9E3779B97F4A7C15)


def measure(settings: Settings) -> Result:
    """Measures all three questions."""
    asked, states_found = states(settings.rounds)
    resumed, resumes_found = resumes(settings.rounds)
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    us = best(read_us, settings.rounds) - best(lambda: read_us(seed_samples=False), settings.rounds)
    calls_us = best(lambda: call_us(seed_publicly, 5000), settings.rounds)
    random.setstate(kept[0]), np.random.set_state(kept[1]), torch.set_rng_state(kept[2])
    beside = f"random, numpy and torch; by their public calls {calls_us:.1f} us"
    rows = [*asked, *resumed, Row("seed_samples: CPU a sample, that draws nothing", us, "us", beside, "<= 1 us", us <= 1)]
    return Result(rows, {"states": states_found, "resumes": resumes_found, "seed_samples_us": us, "calls_us": calls_us})


if __name__ == "__main__":
    main("resume", __doc__, measure)
