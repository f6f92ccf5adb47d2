"""Runs a case in a process of its own, forked from one that has imported everything and started nothing, with its own /dev/shm.

So a case costs a fork instead of an import of torch, no case sees what another left, and a hang or crash is a finding that
includes
the stacks of its threads. The forking process adopts the orphans of a case.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.crossing.cases import Case

LIMIT_S = 60.0
SHM_BYTES = {"usual": 0, "64m": 64 << 20, "512k": 512 << 10}
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _SUBREAPER = 0x00020000, 0x4000, 1 << 18, 36


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    verdict: str  # "right", "refused", "wrong", "error", "hang", "crash", "slow", "left"
    message: str = ""
    detail: str = ""
    num_batches: int = 0
    longest_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.verdict not in ("right", "refused")

    def signature(self, case: Case) -> str:
        """Returns a string that is equal for failures with likely the same cause."""
        message = re.sub(r"\d+(\.\d+)?", "#", self.message)
        message = re.sub(r"(batch|rank|step|held until the end)[^:]*:", "", message)
        return f"{self.verdict} {case.mode} {message[:70]}"


def can_have_own_shm() -> bool:
    """Returns whether this user may give a process its own /dev/shm."""
    return os.geteuid() == 0


def prepare() -> None:
    """Imports what cases need, in the process that forks them."""
    import torch

    torch.set_num_threads(1)
    import numpy.random  # noqa: F401

    import shmload.formats
    import shmload.growing
    import shmload.loader
    import shmload.pipeline
    import shmload.remote

    for name in shmload.formats.__all__:
        try:
            getattr(shmload.formats, name)
        except ImportError:
            pass
    # torch imports torch._dynamo at the first nested tensor, which takes seconds
    for name in ("torch._dynamo", "pyarrow.parquet", "h5py", "zarr", "safetensors.torch", "datasets", "PIL.Image", "psutil"):
        try:
            __import__(name)
        except ImportError:
            pass
    import tests.crossing.habits
    import tests.crossing.pipelines  # noqa: F401

    gc.collect()
    gc.freeze()  # a case then collects only its own objects and copies no older pages
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run_case(case: Case, limit_s: float = LIMIT_S) -> Outcome:
    """Runs a case in a forked child, and waits for it and for all processes that it started."""
    limit_s *= 2 if case.backend == "ray" else 1 + case.loaders / 12  # starting actors takes seconds, many on a busy machine
    reader, writer = os.pipe()
    folder = Path(tempfile.mkdtemp(prefix="crossing-"))
    stacks = folder / "stacks"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(case, folder, writer, stacks, limit_s)
    os.close(writer)
    message, status = _waited(pid, reader, limit_s)
    os.close(reader)
    shown = stacks.read_text(errors="replace") if stacks.exists() else ""
    orphans = _reaped_orphans()
    shutil.rmtree(folder, ignore_errors=True)
    if message is not None:
        outcome = Outcome(**message)
        if orphans and not outcome.is_failure:
            return Outcome("left", f"processes survived the program: {orphans}")
        return outcome
    if status is None:
        return Outcome("hang", f"not finished after {limit_s:g} s", shown)
    return Outcome("crash", f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status}", shown)


def _waited(pid: int, reader: int, limit_s: float) -> tuple[dict[str, object] | None, int | None]:
    """Returns the child's result and its exit status. The status is None if the child was killed at the time limit."""
    data, began = b"", time.monotonic()
    while (left := began + limit_s + _delay_s(pid, limit_s) - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                break
            data += part
            if data.endswith(b"\n"):
                break
    is_late = not data.endswith(b"\n") and left <= 0
    if is_late:
        os.kill(pid, signal.SIGUSR1)  # dumps its stacks
        time.sleep(0.3)
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not data.endswith(b"\n"):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return None, None if is_late else status
    return json.loads(data), status


def _delay_s(pid: int, limit_s: float) -> float:
    """Returns the extra seconds that a case may take because the machine is busy: a case that waits for a CPU does not hang.

    Workers wait about as long as the trainer, and the trainer waits for them.
    """
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):  # a kernel without this counter
        return 0.0
    return min(4 * waited_ns / 1e9, 5 * limit_s)


def _reaped_orphans(timeout_s: float = 30.0) -> list[str]:
    """Waits for the orphans of a case. Kills those that remain and returns their names."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    import psutil

    named = []
    for child in psutil.Process().children(recursive=True):
        try:
            named.append(" ".join(child.cmdline())[:100] or child.name())
            child.kill()
        except psutil.Error:
            pass
    time.sleep(0.1)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return named


def _child(case: Case, folder: Path, writer: int, stacks: Path, limit_s: float) -> None:
    """Runs the case and exits; never returns."""
    try:
        os.setpgid(0, 0)
        faulthandler.enable(stacks.open("w"))
        faulthandler.register(signal.SIGUSR1, stacks.open("a"), all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        if not os.environ.get("CROSSING_LOUD"):
            os.dup2(null, 1)
            os.dup2(null, 2)
        logging.getLogger("shmload").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        tempfile.tempdir = str(folder)
        os.environ["TMPDIR"] = str(folder)
        if case.shm != "host" and can_have_own_shm():
            own_shm(SHM_BYTES[case.shm])
        if case.program == "ignored":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if case.program == "handler":
            signal.signal(signal.SIGCHLD, _reap_all)
        outcome = _outcome(case, folder)
        os.write(writer, json.dumps(asdict(outcome)).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def _reap_all(*_: object) -> None:
    """Waits for every child, as a program's SIGCHLD handler that also takes the children of others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _outcome(case: Case, folder: Path) -> Outcome:
    from tests.crossing.habits import Refused, Trial, Wrong

    trial = Trial(case, folder)
    try:
        trial.run()
        what, message, detail = "right", "", ""
    except Refused as error:
        what, message, detail = "refused", str(error), ""
    except Wrong as error:
        what, message, detail = "wrong", str(error)[:600], traceback.format_exc()[-2500:]
    except BaseException as error:
        what, message, detail = "error", f"{type(error).__name__}: {error}"[:600], traceback.format_exc()[-2500:]
    timer_of_next = trial.timer_of_next
    if what == "right" and timer_of_next.longest_s > trial.wait_max_s() + timer_of_next.allowed_s:
        what, message = "slow", f"next() took {timer_of_next.longest_s:.1f} s"
    return Outcome(what, message, detail, trial.num_batches, round(timer_of_next.longest_s, 3))


def own_shm(nbytes: int) -> None:
    """Mounts a tmpfs over /dev/shm that only this process and its children see, of `nbytes` bytes, or of the default size if 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = b"mode=1777" + (f",size={nbytes}".encode() if nbytes else b"")
    for result in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options),
    ):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
