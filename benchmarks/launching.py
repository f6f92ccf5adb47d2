"""Measure the time until the first line of a launched script appears.

Method: A script with one print runs in one rank. The time from the start of the launcher to the line is measured for `shmload
launch`, for `shmload launch` with restarts, which uses torch's agent, and for torchrun with --standalone. The launchers take
turns; the figures are medians of all rounds except the first.

How to read: torchrun imports torch before it starts anything. `shmload launch` does so only if torch's agent is requested.

Result (2 cores, other work on the machine): `shmload launch` 0.21 s, torchrun 1.21 s; with restarts 1.55 s, which misses its
aim. The cause of the 0.34 s is unknown: importing the command line in addition to torch's agent costs at most 0.1 s of CPU.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.common import Result, Row, Settings, in_order, main

LAUNCH = [sys.executable, "-m", "shmload", "launch", "--nproc-per-node=1"]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
    "shmload launch": LAUNCH,
    "shmload launch --max-restarts 3": [*LAUNCH, "--max-restarts=3"],
}


def first_line_s(command: list[str], script: Path) -> float:
    """Returns the seconds from the start of the launcher to the first line."""
    begin = perf_counter()
    process = subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found_s = perf_counter() - begin
    process.communicate()
    if process.returncode or not line.endswith("here\n"):
        raise SystemExit(f"{' '.join(command)}: code {process.returncode}, first line {line!r}")
    return found_s


def measure(settings: Settings) -> Result:
    """Measures the three launchers."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("print('here')\n")
        times: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
        for number in range(settings.rounds + 1):
            for name in in_order(LAUNCHERS, number):
                times[name].append(first_line_s(LAUNCHERS[name], script))
    found = {name: median(each[1:]) for name, each in times.items()}  # without the first round, which reads from the disk
    torchs = found.pop("torchrun")
    rows = [
        Row(f"first line, {name}", taken, "s", f"torchrun {torchs:.2f} s", f"<= {limit:.2f} x torchrun's", taken <= limit * torchs)
        for (name, taken), limit in zip(found.items(), (0.5, 1.05), strict=True)
    ]
    return Result(rows, {"seconds": times})


if __name__ == "__main__":
    main("launching", __doc__, measure)
