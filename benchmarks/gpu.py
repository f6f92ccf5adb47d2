"""With a GPU: how near do batches come to the limit of pinned copies, what does the trainer pay, and does a step ever wait?

Method: batches of 16 records of 1 MiB. The limit is a copy of one resident pinned tensor of 16 MiB, again and again. Each loader
runs in a fresh process, in turn, round after round: torch's DataLoader with pin_memory=True and `non_blocking` copies, ShmLoader
likewise, and ShmLoader with device="cuda". Bytes/s are of what arrived, behind a synchronisation; trainer CPU is the process's own
clock, all threads. Bubbles: a kernel of 20 ms is the step; what lies between the end of one and the beginning of the next, by
CUDA's events, is what the step waited, the first 10 left out.

How to read: ratios within one round; the copy limit is the machine's. With few cores the workers are the limit, not the copies: the
table says how many there were.

Result: not measured yet.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.common import Result, Row, Settings, main
from benchmarks.datasets import Blocks
from shmload import ShmLoader

BATCH = 16
BATCH_NBYTES = BATCH << 20
STEP_S = 0.02
NUM_WARM = 10
KINDS = ("torch", "shmload pinned", "shmload device")


def _batches(kind: str) -> Iterator[torch.Tensor]:
    """Batches on the device, epoch after epoch, as a training loop would have them."""
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": max((os.cpu_count() or 2) - 1, 1),
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
    }
    if kind == "torch":
        loader: Any = torch.utils.data.DataLoader(Blocks(), pin_memory=True, **options)
    elif kind == "shmload pinned":
        loader = ShmLoader(Blocks(), pin_memory=True, seed=0, **options)
    else:
        loader = ShmLoader(Blocks(), device="cuda", seed=0, **options)
    while True:
        for batch in loader:
            yield torch.as_tensor(next(iter(batch.values())) if isinstance(batch, dict) else batch).to(
                "cuda", non_blocking=True
            )


def _through(kind: str, seconds: float) -> dict[str, float]:
    """Bytes/s and trainer CPU of one loader."""
    batches = _batches(kind)
    for _ in range(NUM_WARM):
        next(batches)
    torch.cuda.synchronize()
    began, cpu, num_batches = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        num_batches += 1
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    return {
        "bytes_s": num_batches * BATCH_NBYTES / took,
        "cpu_us": (time.process_time() - cpu) / num_batches * 1e6,
    }


def _limit(seconds: float) -> dict[str, float]:
    source = torch.zeros(BATCH_NBYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    count = 0
    torch.cuda.synchronize()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        count += 20
    return {"bytes_s": count * BATCH_NBYTES / (time.perf_counter() - began)}


def _bubbles(kind: str, seconds: float) -> dict[str, float]:
    """Milliseconds between steps: the worst and the median."""
    cycles = _cycles_per_s() * STEP_S
    batches, edges = _batches(kind), []
    for _ in range(NUM_WARM + max(int(seconds / STEP_S), 20)):
        batch = next(batches)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        batch[:1].sum()  # the step needs it
        begin.record()
        torch.cuda._sleep(int(cycles))
        end.record()
        edges.append((begin, end))
        if len(edges) > 1:
            edges[-2][1].synchronize()  # no trainer runs further ahead
    torch.cuda.synchronize()
    gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(edges)][NUM_WARM:]
    return {"worst_ms": max(gaps), "median_ms": median(gaps)}


def _cycles_per_s() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return float(50_000_000 / begin.elapsed_time(end) * 1000)


def _case(connection: Any, name: str, arguments: tuple[Any, ...]) -> None:
    connection.send(globals()[name](*arguments))


def _fresh(name: str, *arguments: Any) -> dict[str, float]:
    """A case in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_case, args=(there, name, arguments))
    process.start()
    there.close()
    try:
        found: dict[str, float] = here.recv()
    except EOFError:
        raise SystemExit(f"{name}{arguments} ended without a result: its error is above") from None
    finally:
        process.join()
    return found


def measure(settings: Settings) -> Result:
    """Measures all of it."""
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu: skipped, as torch.cuda.is_available() is False here: nothing was measured", file=sys.stderr
        )
        return Result([])
    rounds = [
        {
            "limit": _fresh("_limit", settings.seconds),
            **{kind: _fresh("_through", kind, settings.seconds) for kind in KINDS},
        }
        for _ in range(settings.rounds)
    ]
    bubbles = {kind: _fresh("_bubbles", kind, settings.seconds) for kind in KINDS}

    def ratio(metric: str, kind: str, other: str) -> float:
        return median(each[kind][metric] / each[other][metric] for each in rounds)

    def beside(kind: str) -> str:
        speed, cpu = (median(each[kind][metric] for each in rounds) for metric in ("bytes_s", "cpu_us"))
        return f"{speed / 1e9:.1f} GB/s, {cpu:.0f} us of trainer CPU a batch"

    rows = []
    for kind in KINDS[1:]:
        of_limit, faster, cheaper = (
            ratio("bytes_s", kind, "limit"),
            ratio("bytes_s", kind, "torch"),
            ratio("cpu_us", "torch", kind),
        )
        rows += [
            Row(
                f"{kind}: bytes/s over the limit of pinned copies",
                of_limit,
                "x",
                beside(kind),
                ">= 0.9x",
                of_limit >= 0.9,
            ),
            Row(f"{kind}: bytes/s over torch", faster, "x", f"torch {beside('torch')}", ">= 1.5x", faster >= 1.5),
            Row(f"{kind}: trainer CPU below torch", cheaper, "x", beside(kind), ">= 20x", cheaper >= 20),
        ]
    for kind, found in bubbles.items():
        text = f"median {found['median_ms']:.3f} ms"
        rows.append(
            Row(f"{kind}: worst bubble, 20 ms steps", found["worst_ms"], "ms", text, "<= 1 ms", found["worst_ms"] <= 1)
        )
    conditions = {"device": torch.cuda.get_device_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    return Result(rows, {"rounds": rounds, "bubbles": bubbles, "conditions": conditions})


if __name__ == "__main__":
    main("gpu", __doc__, measure)
