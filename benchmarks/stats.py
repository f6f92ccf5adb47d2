"""Measure the cost of recording the latest events of every loader, for stats(), `shmload top` and traces.

Method: Two builds in a temporary folder take turns; in one, the recorder is compiled away (SHML_WITHOUT_STATS). Each child, a
fresh process, delivers small shuffled batches of float32 rows as fast as it can. Both builds count (eight loads and stores per
batch, of words that only one process writes), because batches are divided into chunks by the cost of the samples so far, and
both read the clock, which deadlines need.

How to read: The figure is the CPU of trainer and workers per batch, with the recorder minus without, within a round. At 10,000
batches per second, 1 us is 1 % of the time. On a shared machine, a round is accurate to 1 us, and the median of twenty to a few
tenths.

Result (2 cores, 2 workers, 24 rounds, nothing else running): -2.3 us (standard error of the mean 0.7), at 1.06x the batches/s,
41,000 of them. Predicted: +0.06 us, for six events of a cache line each. A build can be faster *with* the recorder because of
the order of its instructions and wake-ups, so the recorder costs less than the random difference between two builds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Result, Row, Settings, in_order, main
from shmload.tools.bench.spread import Spread

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 32

CHILD = """
import json, os, sys, time
import psutil
import torch
from torch.utils.data import TensorDataset
from shmload import ShmLoader

def cpu_s():
    used = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children())]
    return sum(each.user + each.system for each in used)

rows = TensorDataset(torch.randn(262144, 16, generator=torch.Generator().manual_seed(0)))
loader = ShmLoader(rows, batch_size=int(sys.argv[1]), shuffle=True, seed=1, num_workers=2, prefetch_factor=8,
                   persistent_workers=True, multiprocessing_context="fork")
for batch in loader:
    pass
num_batches, cpu, begin = 0, cpu_s(), time.perf_counter()
while time.perf_counter() - begin < float(sys.argv[2]):
    for batch in loader:
        num_batches += 1
elapsed = time.perf_counter() - begin
print(json.dumps({"batches_per_s": num_batches / elapsed, "cpu_us": (cpu_s() - cpu) / num_batches * 1e6}))
loader.close()
"""


def build(folder: Path, flags: str) -> Path:
    """Copies the package, and compiles the parts that record and read stats with the given flags."""
    for name in ("shmload", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("trainer", "filler"):
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        environment = os.environ | {"SHMLOAD_ONLY": name, "CFLAGS": flags}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


def deliver(tree: Path, seconds: float) -> dict[str, float]:
    """Runs one child of a build, and returns its measurements."""
    command = [sys.executable, "-c", CHILD, str(BATCH_SIZE), str(seconds)]
    child = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True, text=True
    )
    measured: dict[str, float] = json.loads(child.stdout)
    return measured


def measure(settings: Settings) -> Result:
    """Measures both builds in turn."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        flags = {"with": "", "without": "-DSHML_WITHOUT_STATS"}
        trees = {name: build(Path(folder) / name, each) for name, each in flags.items()}
        for number in range(settings.rounds):
            names = in_order(trees, number)
            rounds.append({name: deliver(trees[name], settings.seconds) for name in names})
    rate = Spread.of([each["with"]["batches_per_s"] for each in rounds])
    more = Spread.of([each["with"]["cpu_us"] - each["without"]["cpu_us"] for each in rounds])
    pace = Spread.of([each["with"]["batches_per_s"] / each["without"]["batches_per_s"] for each in rounds])
    beside = f"from {more.low:.2f} to {more.high:.2f}; {pace.median:.3f}x the batches/s without, {rate.median:,.0f} batches/s"
    row = Row("recorder: CPU per batch", more.median, "us", beside, "< 1 us: 1 % at 10,000/s", more.median < 1)
    return Result([row], {"rounds": rounds})


if __name__ == "__main__":
    main("stats", __doc__, measure)
