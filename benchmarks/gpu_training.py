"""Measure the speed of ResNet-50 trained on photographs with each loader, compared with its speed on one batch on the device.

    python -m benchmarks.gpu_training --json gpu_training.json

Method: The files of benchmarks.images, 95 kB each, are decoded to random crops of 224; batches of 256, bfloat16 by autocast,
channels last, SGD. Images cross the bus as bytes and are normalized on the device. Each loader and number of workers runs in a
fresh process, in turn, round after round: torch's DataLoader with pin_memory=True and `non_blocking` copies, over simplejpeg
and OpenCV as users write it, and over shmload's ImageFolder; and ShmLoader over that ImageFolder, with device="cuda". The limit
is the same step on a batch that is already on the device. Images/s count the steps that have finished on the device, without
the first 10. CPU is that of all processes.

How to read: If decoding is the limit, images/s show the workers' performance. If the step is the limit, all loaders reach it,
and the CPU shows their cost. The benchmark needs torchvision.

Result (H100, 16 cores, windows of 1 to 2 s; docs/memory.md): 1.14 and 1.51 times torch's images/s with 2 workers and 1.47 with
4, at 0.68 to 0.87 of its CPU. With 8 workers, torch reaches 0.96 of the step's own speed. Windows of 10 s or more are more
precise.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import Result, Row, Settings, main, repeated
from benchmarks.gpu import fresh
from benchmarks.images import CROP, ByHand, photographs
from shmload import ShmLoader
from shmload.formats import ImageDecoder, ImageFolder, Normalize

LIMIT, TORCH, TORCH_FOLDER, OURS = "resident", "torch", "torch and ImageFolder", "shmload"
KINDS = (TORCH, TORCH_FOLDER, OURS)
NUM_WORKERS = (2, 4, 8)
NUM_WARM = 10
NUM_BATCHES = 200  # long enough that no epoch ends during a measurement
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Training:
    """The model and the device. The benchmark's test uses a small model on the CPU."""

    device, start_method = "cuda", "forkserver"
    batch_size = 256

    def model(self) -> nn.Module:
        """Returns a network with 1,000 classes."""
        from torchvision.models import resnet50

        return resnet50()  # type: ignore[no-any-return]  # torchvision is not typed here

    def synchronize(self) -> None:
        """Waits for all pending work."""
        torch.cuda.synchronize()


class Photographs(ByHand):
    """The same files as `ByHand`, repeated for an epoch of any length."""

    def __init__(self, paths: Sequence[str], library: str, num_samples: int) -> None:
        super().__init__(paths, library)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples


def _batches(training: Training, kind: str, num_workers: int, paths: Sequence[str]) -> Generator[Any]:
    """Yields normalized batches on the device, epoch after epoch."""
    normalize, num_samples = Normalize(*IMAGENET), NUM_BATCHES * training.batch_size
    options: dict[str, Any] = {"batch_size": training.batch_size, "num_workers": num_workers}
    options |= {"multiprocessing_context": training.start_method, "persistent_workers": True}
    listed = [paths[n % len(paths)] for n in range(num_samples)]
    dataset: Any = ImageFolder(listed, ImageDecoder(CROP, flip=0.5, fast=True), labels=[n % 1000 for n in range(num_samples)])
    if kind == TORCH:
        dataset = Photographs(paths, "opencv", num_samples)
    if kind == OURS:
        device = None if training.device == "cpu" else training.device
        with ShmLoader(dataset, seed=0, device=device, after_batch=normalize, **options) as loader:
            while True:
                yield from loader
    loader = torch.utils.data.DataLoader(dataset, pin_memory=training.device != "cpu", **options)
    while True:
        for batch in loader:
            yield normalize({name: tensor.to(training.device, non_blocking=True) for name, tensor in batch.items()})


def trained(training: Training, kind: str, num_workers: int, paths: Sequence[str], seconds: float) -> dict[str, float]:
    """Measures images/s and CPU microseconds per image of one loader."""
    torch.backends.cudnn.benchmark = True
    model = training.model().to(training.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batches = _batches(training, OURS if kind == LIMIT else kind, num_workers, paths)
    source = cycle([next(batches)]) if kind == LIMIT else batches

    def step() -> None:
        batch = next(source)
        # The labels of ByHand are indices.
        images, labels = batch["image"].contiguous(memory_format=torch.channels_last), batch["label"] % 1000
        with torch.autocast(training.device, torch.bfloat16):
            loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.synchronize()  # as in a program that logs the loss

    with closing(batches):
        for _ in range(NUM_WARM):
            step()
        cpu_s = _cpu_s()
        num_steps, took = repeated(step, seconds)
        num_images = num_steps * training.batch_size
        return {"images_s": num_images / took, "cpu_us": (_cpu_s() - cpu_s) / num_images * 1e6}


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and its children."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _case(*arguments: Any) -> dict[str, float]:
    return trained(Training(), *arguments)


def measure(settings: Settings) -> Result:
    """Measures all cases."""
    if not torch.cuda.is_available():
        print("benchmarks.gpu_training: skipped, as torch.cuda.is_available() is False here: nothing was measured", file=sys.stderr)
        return Result([])
    return measured(settings, partial(fresh, _case), torch.cuda.get_device_name())


def measured(settings: Settings, run: Callable[..., dict[str, float]], device: str) -> Result:
    """Runs all cases with `run`."""
    cases = [(LIMIT, 1), *((kind, num_workers) for num_workers in NUM_WORKERS for kind in KINDS)]
    with photographs() as paths:
        rounds = [{case: run(*case, paths, settings.seconds) for case in cases} for _ in range(settings.rounds)]

    def of(metric: str, kind: str, num_workers: int) -> float:
        return median(each[kind, num_workers][metric] for each in rounds)

    def over(metric: str, kind: str, other: str, num_workers: int) -> float:
        return median(each[kind, num_workers][metric] / each[other, num_workers][metric] for each in rounds)

    rows = []
    for num_workers in NUM_WORKERS:
        speeds = ", ".join(f"{kind} {of('images_s', kind, num_workers):.0f}" for kind in KINDS)
        costs = ", ".join(f"{kind} {of('cpu_us', kind, num_workers):.0f}" for kind in KINDS)
        faster, cheaper = over("images_s", OURS, TORCH, num_workers), over("cpu_us", OURS, TORCH, num_workers)
        name = f"{num_workers} workers"
        beside = f"{speeds}; the step alone {of('images_s', LIMIT, 1):.0f}"
        rows.append(Row(f"{name}: images/s over torch's", faster, "x", beside, ">= 1x", faster >= 1))
        rows.append(Row(f"{name}: CPU an image over torch's", cheaper, "x", f"us: {costs}", "< 1x", cheaper < 1))
    plain = [{f"{kind}, {num_workers}": found for (kind, num_workers), found in each.items()} for each in rounds]
    return Result(rows, {"rounds": plain, "conditions": {"device": device, "torch": torch.__version__}})


if __name__ == "__main__":
    main("gpu_training", __doc__, measure)
