"""A case in a process of its own: forked from one that has imported everything and started nothing, with a /dev/shm of its own.

So a case costs a fork and not an import of torch, none sees what another left, and one that hangs or crashes is a finding with the
stacks of its threads. The forking process takes in what orphans a case leaves.
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
    """What became of a case."""

    what: str  # "right", "refused", "wrong", "error", "hang", "crash", "slow", "left"
    said: str = ""
    detail: str = ""
    num_batches: int = 0
    longest_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.what not in ("right", "refused")

    def signature(self, case: Case) -> str:
        """The same for what is likely the same defect."""
        said = re.sub(r"\d+(\.\d+)?", "#", self.said)
        said = re.sub(r"(batch|rank|step|held until the end)[^:]*:", "", said)
        return f"{self.what} {case.mode} {said[:70]}"


def can_have_own_shm() -> bool:
    """Whether this user may give a process a /dev/shm of its own."""
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
    # torch._dynamo is what torch imports at the first nested tensor, for seconds
    for name in ("torch._dynamo", "pyarrow.parquet", "h5py", "zarr", "safetensors.torch", "datasets", "PIL.Image", "psutil"):
        try:
            __import__(name)
        except ImportError:
            pass
    import tests.crossing.habits
    import tests.crossing.pipelines  # noqa: F401

    gc.collect()
    gc.freeze()  # a case collects what it made itself, and copies no pages of what was there before
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run_case(case: Case, limit_s: float = LIMIT_S) -> Outcome:
    """Runs a case in a forked child, and waits for it and all that it started."""
    limit_s *= 2 if case.backend == "ray" else 1 + case.loaders / 12  # seconds of their own, on a busy machine many
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
    said, status = _waited(pid, reader, limit_s)
    os.close(reader)
    shown = stacks.read_text(errors="replace") if stacks.exists() else ""
    orphans = _reaped_orphans()
    shutil.rmtree(folder, ignore_errors=True)
    if said is not None:
        outcome = Outcome(**said)
        if orphans and not outcome.is_failure:
            return Outcome("left", f"processes outlive the program: {orphans}")
        return outcome
    if status is None:
        return Outcome("hang", f"not done after {limit_s:g} s", shown)
    return Outcome("crash", f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status}", shown)


def _waited(pid: int, reader: int, limit_s: float) -> tuple[dict[str, object] | None, int | None]:
    """What the child said, and how it ended; None: it was killed for its time."""
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
        os.kill(pid, signal.SIGUSR1)  # its stacks
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
    """Return the seconds more that a case may take because the machine has other work: a case that waits for a processor does not hang.

    Workers wait about as long as the trainer, and the trainer waits for them.
    """
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):  # a kernel that does not count it
        return 0.0
    return min(4 * waited_ns / 1e9, 5 * limit_s)


def _reaped_orphans(retry_policy_s: float = 5.0) -> list[str]:
    """Waits for what a case's processes left to this one; those that stay are named, and killed."""
    deadline = time.monotonic() + retry_policy_s
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
    """Never returns."""
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
    """A program's handler of SIGCHLD, which takes what belongs to others, too."""
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
        what, said, detail = "right", "", ""
    except Refused as error:
        what, said, detail = "refused", str(error), ""
    except Wrong as error:
        what, said, detail = "wrong", str(error)[:600], traceback.format_exc()[-2500:]
    except BaseException as error:
        what, said, detail = "error", f"{type(error).__name__}: {error}"[:600], traceback.format_exc()[-2500:]
    watch = trial.watch
    if what == "right" and watch.longest_s > trial.wait_max_s() + watch.allowed_s:
        what, said = "slow", f"next() took {watch.longest_s:.1f} s"
    return Outcome(what, said, detail, trial.num_batches, round(watch.longest_s, 3))


def own_shm(nbytes: int) -> None:
    """A tmpfs over /dev/shm that only this process and its children see; of so many bytes, 0: as many as there are."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = b"mode=1777" + (f",size={nbytes}".encode() if nbytes else b"")
    for result in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options),
    ):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
