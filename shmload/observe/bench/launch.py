"""Runs jobs in a fresh process, watches its memory from outside, and brings the answers back."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shmload.observe.bench.job import Job, Outcome
from shmload.observe.bench.procfs import descendants, tree_pss_bytes

PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
BOOT = "import sys; sys.path.append(sys.argv[1]); from shmload.observe.bench.child import main; main()"
SAMPLE_EVERY_S = 0.05
INTERRUPTED_S = 2.0  # ^C reaches the process too; this long it may tidy up
EXIT_S = 10.0  # some loaders hang in their own shutdown; the figures are in by then


def run_jobs(jobs: Sequence[Job], done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Measures `jobs` one after another in one fresh interpreter; one outcome a job, also if the process dies."""
    read_fd, write_fd = os.pipe()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryFile("w+") as output, os.fdopen(read_fd, "rb", buffering=0) as events:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                BOOT,
                PACKAGE_PARENT,
                str(write_fd),
            ],  # -P: a source tree here is not the package
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[write_fd],
        )
        os.close(write_fd)
        try:
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps([job.as_dict() for job in jobs]).encode())
            for outcome in follow(process, events.fileno(), jobs):
                outcomes.append(outcome)
                done(outcome)
            end(process, EXIT_S)
        finally:
            end(process, INTERRUPTED_S)
        output.seek(0)
        tail = output.read()[-4000:]
    for job in jobs[len(outcomes) :]:
        why = f"its process ended with {ending(process.returncode)} before it answered"
        outcomes.append(Outcome(job, error=why, details=tail))
        done(outcomes[-1])
    return outcomes


def follow(process: "subprocess.Popen[bytes]", fd: int, jobs: Sequence[Job]) -> Any:
    """Yields an outcome per answered job; samples memory while the process asks for it."""
    sampling, peak, pending = False, 0, b""
    answered = 0
    while answered < len(jobs):
        if not select.select([fd], [], [], SAMPLE_EVERY_S if sampling else 0.25)[0]:
            if sampling:
                peak = max(peak, tree_pss_bytes(process.pid))
            elif process.poll() is not None:
                return
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for event in map(json.loads, lines):
            if event["event"] == "memory":
                sampling, peak = True, tree_pss_bytes(process.pid)
                continue
            values = event.get("values", {}) | ({"peak_pss_mb": peak / 1e6} if sampling else {})
            sampling = False
            answered += 1
            yield Outcome(
                jobs[event["job"]],
                values,
                event.get("digests", []),
                event.get("wait_quantiles_ms", []),
                event.get("rows_digest"),
                event.get("error"),
                event.get("bad_usage", False),
                event.get("details", ""),
            )


def end(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Waits for the process; past the deadline it and all below it are killed."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def ending(returncode: int) -> str:
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"code {returncode}"
