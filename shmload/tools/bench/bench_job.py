"""Run jobs in a fresh process. A job measures one loader on one dataset; jobs and answers are passed as JSON."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIN_BATCHES = 20  # fewer say too little about a rate
LIMIT_S = 30.0  # of the warm-up and of the timed part, while they wait for enough batches


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """A job for a fresh process: measure one loader on one dataset.

    Args:
        workload: name used in reports.
        dataset: `module:name` of the dataset or its factory; called with `arguments`.
        loader: a name of the contestants' table or `module:factory`; empty means the limit without any loader.
        batch_size, num_workers: None if the user's own DataLoader sets it.
        prefetch_factor: batches ordered ahead for each worker; None is torch's default.
        torch_loader: `module:name` of a torch DataLoader or of the function that makes it; `dataset` is then empty.
        arguments: keyword arguments of the dataset's factory.
        seconds: length of the timed part; 0 skips it.
        min_batches: least number of batches of the timed part, for which it may take longer, up to LIMIT_S.
        warmup_s: least length of the part before it, which is not timed.
        step_s: how long the trainer sleeps after each batch, in place of a training step.
        seed: seed of the order.
        start_method: start method of the workers; None is Python's default.
        collate: `module:name` of a collate function; None is the loader's default.
        num_digests: batches of an untimed pass whose bytes are digested; none are of a loader with an order of its own.
        memory_s: seconds of delivery during which memory is sampled.
        scratch: a folder for the loader's own files.
    """

    workload: str
    dataset: str
    loader: str
    batch_size: int | None
    num_workers: int | None
    prefetch_factor: int | None = None
    torch_loader: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 2.0
    min_batches: int = MIN_BATCHES
    warmup_s: float = 1.0
    step_s: float = 0.0
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    num_digests: int = 0
    memory_s: float = 0.0
    scratch: str | None = None


@dataclass(frozen=True)
class TaskOutcome:
    """The answer to one job: `values` by metric and batch `digests`, or an `error` line.

    `bad_usage` means that the user's dataset or options are at fault, not a loader.
    """

    values: dict[str, float] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    error: str | None = None
    bad_usage: bool = False
    details: str = ""


PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
BOOT = "import sys; sys.path.append(sys.argv[1]); from shmload.tools.bench.measure import main; main()"
INTERRUPTED_S = 2.0  # after forwarding ^C, the time the process has to clean up


def run_jobs(jobs: Sequence[BenchJob]) -> list[TaskOutcome]:
    """Measure `jobs` one after another in one fresh interpreter; return one outcome per job, even if the process dies."""
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile() as answers:
        # -P: a source tree in the current folder is not the package to measure
        command = [sys.executable, "-P", "-c", BOOT, PACKAGE_PARENT, answers.name]
        # a session of its own, so that everything a loader leaves running is ended with it
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        try:
            process.communicate(json.dumps([asdict(job) for job in jobs]).encode())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_S)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        outcomes = [TaskOutcome(**json.loads(line)) for line in answers if line.endswith(b"\n")]
        output.seek(0)
        tail = output.read()[-4000:]
    status = process.returncode
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"code {status}"
    why = f"its process ended with {ending} before it answered"
    return outcomes + [TaskOutcome(error=why, details=tail) for _ in jobs[len(outcomes) :]]
