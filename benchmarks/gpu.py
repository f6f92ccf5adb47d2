"""Measure, with a GPU, how close batches come to the limit of pinned copies, what the trainer pays, and whether a step ever waits.

    python -m benchmarks.gpu --json gpu.json

Method: Batches of 16 records of 1 MiB. The limit is the rate of repeated copies of one pinned tensor of 16 MiB. Each loader
runs in a fresh process, in turn, round after round: torch's DataLoader with pin_memory=True and `non_blocking` copies;
ShmLoader with the same; ShmLoader with device="cuda"; and ShmLoader without any copy, which shows the workers' rate. Bytes/s
count what has arrived, after a synchronization. Trainer CPU is the CPU time of the process, of all threads.

Bubbles: A step is a kernel of 20 ms. The time from the end of one kernel to the beginning of the next, by CUDA events, is the
wait of the step; the first 10 are ignored.

Then the following is measured once: the time to register a GiB in pieces of 16 MiB; whether batches are pinned; and the device
calls of a pass, which are written to gpu.log.jsonl and replayed on the simulated device.

How to read: Compare ratios within one round. The limit is the machine's: either the rate of its copies or, if there are few
cores or little memory bandwidth, the rate of workers whose batches are not copied, whichever is less. Put gpu.log.jsonl into
tests/device, where tests replay it.

Result (H100, 15 workers; docs/memory.md): 15 and 16.7 times torch's bytes/s, 0.91 and 0.94 of the lesser limit, a 22nd and a
27th of the CPU of torch's trainer, and no bubble of device="cuda" above 0.011 ms. Two changes were tried and dropped, because
they made no difference beyond the machine's noise of 15 %: not querying later batches of a stream that has not reached an
earlier one (predicted to save 40 us per batch), and events for which the host sleeps.
"""

import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import Result, Row, Settings, main, repeated
from benchmarks.datasets import Blocks
from shmload import ShmLoader
from shmload.device.cuda import CudaDevice
from tests.simulated_device.device_log import Logged, load_log
from tests.simulated_device.device_replay import replay

BATCH = 16
BATCH_NBYTES = BATCH << 20
STEP_S = 0.02
NUM_WARM = 10
NUM_LOGGED = 40  # number of logged batches
KINDS = ("torch", "shmload pinned", "shmload device")
HOST = "shmload without copies"
BUCKETS_MS = (0.1, 0.3, 1.0, 3.0, 10.0)
LOG = Path("gpu.log.jsonl")


class Cuda:
    """The measured device. The benchmark's test replaces it with a simulated one."""

    device: Any = "cuda"
    batch_size = BATCH
    num_workers = max((os.cpu_count() or 2) - 1, 1)
    pin_torch = True
    start_method = "forkserver"

    def name(self) -> str:
        """Returns the device's name."""
        return torch.cuda.get_device_name()

    def calls(self) -> CudaDevice:
        """Returns the interface through which the ring uses the device."""
        return CudaDevice()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the device as a training loop does."""
        return tensor.to("cuda", non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns host memory for the copies that define the limit."""
        return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()

    def synchronize(self) -> None:
        """Waits for all pending work."""
        torch.cuda.synchronize()

    def event(self) -> Any:
        """Records an event on the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spin(self, cycles: int) -> None:
        """Keeps the device busy."""
        torch.cuda._sleep(cycles)


class Blocks16(Blocks):
    """The same blocks as `Blocks`. Each worker creates them, so that 64 MiB are not sent through pipes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_samples,)


class Images:
    """Random bytes as images; sample i is drawn with seed i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.random.default_rng(index).integers(0, 256, (32, 24, 3), np.uint8)}


def _options(gpu: Cuda) -> dict[str, Any]:
    return {
        "batch_size": gpu.batch_size,
        "num_workers": gpu.num_workers,
        "multiprocessing_context": gpu.start_method,
        "persistent_workers": True,
    }


def _batches(gpu: Cuda, kind: str) -> Generator[torch.Tensor]:
    """Yields batches on the device, epoch after epoch, as a training loop receives them."""
    if kind == "torch":
        loader: Any = torch.utils.data.DataLoader(Blocks16(), pin_memory=gpu.pin_torch, **_options(gpu))
    elif kind == "shmload pinned":
        loader = ShmLoader(Blocks16(), pin_memory=True, seed=0, **_options(gpu))
    else:
        device = gpu.device if kind == "shmload device" else None
        loader = ShmLoader(Blocks16(), device=device, seed=0, **_options(gpu))
    try:
        while True:
            for batch in loader:
                yield batch["x"] if kind in (HOST, "shmload device") else gpu.send(batch["x"])
    finally:
        if isinstance(loader, ShmLoader):
            loader.close()


def loader_speed(gpu: Cuda, kind: str, seconds: float) -> dict[str, float]:
    """Measures bytes/s and trainer CPU of one loader."""
    with closing(_batches(gpu, kind)) as batches:
        for _ in range(NUM_WARM):
            next(batches)
        gpu.synchronize()
        began, cpu_s = time.perf_counter(), time.process_time()
        num_batches, _ = repeated(lambda: next(batches), seconds)
        gpu.synchronize()
        took = time.perf_counter() - began
        cpu_us = (time.process_time() - cpu_s) / num_batches * 1e6
        return {"bytes_s": num_batches * (gpu.batch_size << 20) / took, "cpu_us": cpu_us}


def limit(gpu: Cuda, seconds: float) -> dict[str, float]:
    """Measures bytes/s of copies of one pinned tensor."""
    source = gpu.pinned(BATCH_NBYTES)
    target = gpu.send(source)
    gpu.synchronize()

    def copies() -> None:
        for _ in range(20):
            target.copy_(source, non_blocking=True)
        gpu.synchronize()

    count, took = repeated(copies, seconds)
    return {"bytes_s": 20 * count * BATCH_NBYTES / took}


def bubbles(gpu: Cuda, kind: str, seconds: float) -> dict[str, float]:
    """Measures the milliseconds between steps: the maximum, the median, and a histogram with the edges BUCKETS_MS."""
    edges: list[tuple[Any, Any]] = []
    with closing(_batches(gpu, kind)) as batches:
        next(batches)  # workers start before any work is queued on the device
        cycles = int(_cycles_per_s(gpu) * STEP_S)
        for _ in range(NUM_WARM + max(int(seconds / STEP_S), 20)):
            next(batches)[:1].sum()  # the step needs the batch
            begin = gpu.event()
            gpu.spin(cycles)
            edges.append((begin, gpu.event()))
            if len(edges) > 1:
                edges[-2][1].synchronize()  # limits how far the trainer runs ahead
        gpu.synchronize()
    gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(edges)][NUM_WARM:]
    steps = [begin.elapsed_time(end) for begin, end in edges]
    counts = np.histogram(gaps, [-np.inf, *BUCKETS_MS, np.inf])[0].tolist()
    buckets = {f"up to {edge} ms": count for edge, count in zip((*BUCKETS_MS, "more"), counts, strict=True)}
    return {"worst_ms": max(gaps), "median_ms": median(gaps), "step_ms": median(steps), **buckets}


def _cycles_per_s(gpu: Cuda) -> float:
    gpu.spin(1000)
    begin = gpu.event()
    gpu.spin(50_000_000)
    end = gpu.event()
    end.synchronize()
    return float(50_000_000 / begin.elapsed_time(end) * 1000)


def registering(gpu: Cuda, nbytes: int) -> dict[str, float]:
    """Measures the seconds per GiB to register memory in pieces of a batch, and to unregister it."""
    calls, memory = gpu.calls(), mmap.mmap(-1, nbytes)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.fill_(1)
    gpu.synchronize()
    pieces = range(whole.data_ptr(), whole.data_ptr() + nbytes, BATCH_NBYTES)
    times = [time.perf_counter()]
    for of in (lambda address: calls.register(address, BATCH_NBYTES), calls.unregister):
        for address in pieces:
            of(address)
        times.append(time.perf_counter())
    return {
        name: (after - before) * (1 << 30) / nbytes
        for name, (before, after) in zip(("register_s", "unregister_s"), pairwise(times), strict=True)
    }


def checks(gpu: Cuda) -> dict[str, float]:
    """Checks correctness. Returns the share of pinned batches, and the number of findings in the log."""
    few = {**_options(gpu), "num_workers": 1, "seed": 0}
    with ShmLoader(Blocks16(8 * gpu.batch_size), pin_memory=True, **few) as loader:
        pinned = [batch["x"].is_pinned() for batch in loader]
    logged = Logged(gpu.calls())
    with ShmLoader(Images(NUM_LOGGED * gpu.batch_size), device=logged, **few) as loader:  # small, because every copy is replayed
        for batch in loader:
            batch["image"][:1].sum()
    logged.save(LOG, origin="benchmarks/gpu.py", device_name=gpu.name(), torch=torch.__version__)
    return {"pinned": sum(pinned) / len(pinned), "findings": len(replay(load_log(LOG)[1]))}


def fresh(case: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Runs a case in a process of its own and returns its result."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(there, case, arguments))
    process.start()
    there.close()
    try:
        found: dict[str, float] = here.recv()
    except EOFError:
        raise SystemExit(f"{case.__name__}{arguments} ended without a result: its error is above") from None
    finally:
        process.join()
    return found


def _send(connection: Any, case: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> None:
    connection.send(case(*arguments))


def _case(name: str, *arguments: Any) -> dict[str, float]:
    found: dict[str, float] = globals()[name](Cuda(), *arguments)
    return found


def measure(settings: Settings) -> Result:
    """Measures all cases."""
    if not torch.cuda.is_available():
        print("benchmarks.gpu: skipped, as torch.cuda.is_available() is False here: nothing was measured", file=sys.stderr)
        return Result([])
    return measured(settings, partial(fresh, _case), Cuda())


def measured(settings: Settings, run: Callable[..., dict[str, float]], gpu: Cuda) -> Result:
    """Runs all cases with `run`."""
    rounds = [
        {"limit": run("limit", settings.seconds), **{kind: run("loader_speed", kind, settings.seconds) for kind in (*KINDS, HOST)}}
        for _ in range(settings.rounds)
    ]
    waits = {kind: run("bubbles", kind, settings.seconds) for kind in KINDS}
    registered, right = run("registering", 1 << 30), run("checks")
    conditions = {
        "device": gpu.name(),
        "cores": os.cpu_count(),
        "workers": gpu.num_workers,
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    rows = [*_speeds(rounds), *_waits(waits), *_once(registered, right)]
    everything = {"rounds": rounds, "bubbles": waits, "registering": registered, "checks": right}
    return Result(rows, {**everything, "conditions": conditions})


def _speeds(rounds: list[dict[str, dict[str, float]]]) -> Iterator[Row]:
    def ratio(metric: str, kind: str, other: str) -> float:
        return median(each[kind][metric] / each[other][metric] for each in rounds)

    def beside(kind: str) -> str:
        speed = median(each[kind]["bytes_s"] for each in rounds)
        cpu = "" if kind == "limit" else f", {median(each[kind]['cpu_us'] for each in rounds):.0f} us of trainer CPU a batch"
        return f"{kind} {speed / 1e9:.2f} GB/s{cpu}"

    for kind in KINDS[1:]:
        of_limit = median(each[kind]["bytes_s"] / min(each[of]["bytes_s"] for of in ("limit", HOST)) for each in rounds)
        faster = ratio("bytes_s", kind, "torch")
        cheaper = ratio("cpu_us", "torch", kind)
        limits = f"{beside('limit')}; {beside(HOST)}"
        yield Row(f"{kind}: bytes/s over the lesser limit, of copies or workers", of_limit, "x", limits, ">= 0.9x", of_limit >= 0.9)
        yield Row(f"{kind}: bytes/s over torch", faster, "x", beside(kind), ">= 1.5x", faster >= 1.5)
        yield Row(f"{kind}: trainer CPU below torch", cheaper, "x", beside("torch"), ">= 20x", cheaper >= 20)


def _waits(found: dict[str, dict[str, float]]) -> Iterator[Row]:
    for kind, waits in found.items():
        counts = ", ".join(f"{name}: {count:.0f}" for name, count in waits.items() if not name.endswith("_ms"))
        text = f"median {waits['median_ms']:.3f} ms; {counts}; steps of {waits['step_ms']:.1f} ms"
        yield Row(f"{kind}: worst bubble, 20 ms steps", waits["worst_ms"], "ms", text, "<= 1 ms", waits["worst_ms"] <= 1)


def _once(registered: dict[str, float], right: dict[str, float]) -> Iterator[Row]:
    undone = f"unregistering {registered['unregister_s']:.3f} s"
    yield Row("registering a GiB in pieces of 16 MiB", registered["register_s"], "s", undone, "-", True)
    yield Row("batches of a pinned ring that are pinned", right["pinned"], "of 1", "", "1", right["pinned"] == 1)
    yield Row("findings in the log of a pass", right["findings"], "", str(LOG), "0", right["findings"] == 0)


if __name__ == "__main__":
    main("gpu", __doc__, measure)
