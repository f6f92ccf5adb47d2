"""A template process for spawn and forkserver, which imports the workers' modules once and forks each worker.

A fresh interpreter takes 1.5 s and 150 MiB of its own to import torch. The template does that once for its trainer. A worker is a
fork of the template, shares its pages, and starts in milliseconds.

    trainer     modules, descriptors  ──▶  template     imports them and forks     ──▶  worker
                pid, later exit code  ◀──               by a pipe for each worker
                multiprocessing's data for a process  ──────────────────────────────▶

The guarantees of spawn and forkserver hold. The template is a fresh interpreter without any of the trainer's memory. It forks
only while it has one thread. A worker runs multiprocessing's start code for spawned processes, and imports `__main__` itself.
Random state that a fresh start would seed is seeded again (numpy's generator). The properties that a fresh process would inherit
from the trainer are either sent (environment, output) or compared: if credentials, limits, ignored signals and the like have
changed since the template was started (`_origin`), a new one is started.

multiprocessing's own fork server is unsuitable: if it is killed with its trainer, it leaves a folder in /tmp for its socket;
workers and their child processes keep it alive; when it dies, its children seem to have ended; and the user decides which modules
it imports. The template takes its requests from a socket whose other end only the trainer holds, so it ends with the trainer.

If no template can be started, or it dies during a request, the worker is started without it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import logging
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import connection, context, popen_forkserver, reduction
from multiprocessing import forkserver as public_forkserver
from multiprocessing import resource_tracker as public_resource_tracker
from multiprocessing import spawn as public_spawn
from multiprocessing import util as public_util
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

from shmload.processes import private_fds
from shmload.shm import reaper

log = logging.getLogger("shmload")

forkserver: Any = public_forkserver  # for access to private names, which are the same from Python 3.11 to 3.14
resource_tracker: Any = public_resource_tracker
spawn: Any = public_spawn
util: Any = public_util

FOR_ALL: tuple[str, ...] = ("shmload.worker.pool",)  # modules for every worker
FOR_TORCH = ("torch", "shmload.worker.torch_side")  # modules for workers that use torch
_LOADER = "shmload.loader"  # takes 0.2 s more; workers of a program that uses ShmLoader import it

_PROGRAM = "import sys; sys.path[:] = {path!r}; from shmload.worker.template import serve; serve({number})"
_REQUEST_NBYTES, _REQUEST_FDS = 65536, 253  # largest request; 253 is the kernel's limit on descriptors in a message
_SIGNALS = {signal.SIGINT: signal.SIG_IGN, signal.SIGCHLD: signal.SIG_DFL}
_THREAD_LOOKS = 20


def serve(number: int) -> NoReturn:
    """Run the template process: take requests from a socket until the trainer is gone.

    Args:
        number: descriptor of the socket.
    """
    fresh = {each: signal.signal(each, how) for each, how in _SIGNALS.items()}
    util._close_stdin()
    control = socket.socket(fileno=number)
    workers: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and the descriptor that reports its end
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != number:
                poll.unregister(fd)
                _report(*workers.pop(fd))
                os.close(fd)
                continue
            modules, fds, _, _ = socket.recv_fds(control, _REQUEST_NBYTES, _REQUEST_FDS)
            if not modules:
                os._exit(0)  # without cleanup, during which the trainer may kill it; the modules have nothing to clean up
            for name in modules.decode().split():
                with suppress(Exception):  # the worker that needs the module imports it again, and reports the error
                    importlib.import_module(name)
            if not fds:
                continue
            pid = _fork()
            if pid == 0:
                control.close()
                for pidfd, (_, status) in workers.items():
                    util.close_fds(pidfd, status)
                _work(fresh, *fds)
            if pid > 0:
                pidfd = os.pidfd_open(pid)
                workers[pidfd] = pid, os.dup(fds[0])
                poll.register(pidfd, select.POLLIN)
                with suppress(OSError):
                    forkserver.write_signed(fds[0], pid)
            util.close_fds(*fds)


def _fork() -> int:
    """Fork like os.fork; return -1 if there is a second thread that does not end, or if forking fails."""
    with suppress(OSError):
        if not _is_alone():  # a trial fork makes OpenBLAS end its threads
            with warnings.catch_warnings(action="ignore"):  # about threads
                trial = os.fork()
            if trial == 0:
                os._exit(0)
            os.waitpid(trial, 0)
            for _ in range(_THREAD_LOOKS):
                if _is_alone():
                    break
                sleep(0.001)  # a joined thread is still listed for a moment
            else:
                return -1
        util._flush_std_streams()  # so that the output of an import is printed once
        gc.freeze()  # shared pages stay shared, although the collector writes to the objects it visits
        return os.fork()
    return -1


def _is_alone() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _report(pid: int, status: int) -> None:
    with suppress(OSError):  # the trainer is gone
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        forkserver.write_signed(status, code)
    os.close(status)


def _work(fresh: dict[Any, Any], status: int, data: int, tracker: int, stdout: int, stderr: int, *inherited: int) -> NoReturn:
    """Run a worker as multiprocessing's fork server does, and exit.

    Args:
        fresh: the handlers of the signals that the template changed, as they were before.
        status: the pipe of the exit code, which only the template writes.
        data: the pipe that contains the pickled process.
        tracker: the pipe of multiprocessing's resource tracker.
        stdout, stderr: the trainer's.
        inherited: other descriptors that the pickled process names.
    """
    code = 1
    try:
        for each, how in fresh.items():
            signal.signal(each, how)
        os.close(status)
        for fd in (data, tracker, *inherited):
            os.set_inheritable(fd, False)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        util.close_fds(stdout, stderr)
        forkserver._forkserver._inherited_fds = list(inherited)  # DupFd looks descriptors up there
        resource_tracker._resource_tracker._fd = tracker
        if "numpy.random" in sys.modules:  # numpy seeds its generator on import; Python's own is seeded at a fork
            sys.modules["numpy.random"].seed()
        waiting = select.poll()
        waiting.register(data, select.POLLIN)
        if waiting.poll()[0][1] & select.POLLIN:  # otherwise the trainer is gone, or no longer waits
            code = spawn._main(data, os.dup(data))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        atexit._run_exitfuncs()
        util._flush_std_streams()
    finally:
        os._exit(code)


class _Environment:
    """An object whose unpickling sets the process's environment. It comes first in multiprocessing's preparation data."""

    def __reduce__(self) -> Any:
        return _set_environment, (dict(os.environb),)


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - wanted.keys():
        del os.environb[name]
    os.environb.update(wanted)


# ------------------------------------------------------------ in the trainer


class Template:
    """The trainer's end of one template process. The process is killed when this object dies.

    The object lives as long as it is the current template, or one of its workers refers to it.

    Args:
        origin: the result of `_origin` for the start method.
    """

    def __init__(self, origin: Any) -> None:
        self.origin = origin
        path = spawn.get_preparation_data("")["sys_path"]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = private_fds.keep(ours.detach())
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*_interpreter(), "-c", _PROGRAM.format(path=path, number=theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    restore_signals=False,  # Python ignores the same signals again
                )
        except BaseException:
            private_fds.close(self._control)
            raise
        weakref.finalize(self, _end, self.process, self._control, os.getpid())

    @property
    def is_alive(self) -> bool:
        """Return whether the template takes requests: it has not ended, and the program has not closed its socket."""
        return self.process.poll() is None and private_fds.is_kept(self._control)

    def request(self, modules: Iterable[str], fds: Iterable[int] = ()) -> None:
        """Make the template import modules, and fork a worker if descriptors for one are given, without waiting for either.

        Args:
            modules: names of the modules.
            fds: the descriptors of the worker, as `_work` takes them.
        Raises:
            OSError: the template has ended.
        """
        reaper.watch(self.process.pid)
        with socket.socket(fileno=os.dup(self._control)) as control:
            socket.send_fds(control, [" ".join(modules).encode()], list(fds))


def _end(process: subprocess.Popen[bytes], control: int, owner: int) -> None:
    if os.getpid() != owner:
        process.returncode = 0  # not this process's child: nothing to wait for or to warn about
        return
    private_fds.close(control)
    process.kill()
    process.wait()
    reaper.forget(process.pid)


_lock = threading.Lock()
_current: Template | None = None


def _forget() -> None:
    global _lock, _current
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def template_for(method: str) -> Template:
    """Return the template for a worker that is started now by this method: the current one if it still fits, else a new one.

    Args:
        method: "spawn" or "forkserver".
    Raises:
        OSError: no template runs, and none can be started.
    """
    global _current
    origin = _origin(method)
    with _lock:
        if _current is None or _current.origin != origin or not _current.is_alive:
            _current = Template(origin)
            _current.request((*_preload(method), *FOR_ALL))
        return _current


def _interpreter() -> list[Any]:
    return [spawn.get_executable(), *util._args_from_interpreter_flags()]


def _preload(method: str) -> list[str]:
    """Return the modules that the user has preloaded into multiprocessing's fork server, except `__main__`."""
    modules: list[str] = forkserver._forkserver._preload_modules if method == "forkserver" else []
    return [name for name in modules if name != "__main__"]


# lines of /proc/thread-self/status with properties that a process inherits from its parent
_STATUS = (
    "Umask:",
    "Uid:",
    "Gid:",
    "Groups:",
    "SigBlk:",
    "SigIgn:",
    "Cap",
    "NoNewPrivs:",
    "Seccomp",
    "Cpus_allowed:",
    "Mems_allowed:",
)
# variables that are read when an interpreter starts, or when numpy, torch or shmload is imported
_READ_AT_START = re.compile(
    r"PYTHON|LD_|LC_|LANG|TZ$|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NPY_|NUMPY_|NUMEXPR_|TORCH|PYTORCH_|ATEN_|CUDA_|NVIDIA_|"
    r"GLIBC_|MALLOC_|SHMLOAD_"
)


def _origin(method: str) -> Any:
    """Return the properties that a process started now would inherit. A template with other properties must not be used."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        _interpreter(),
        _preload(method),
        [line for line in status if line.startswith(_STATUS)],
        *(Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        *(os.readlink(f"/proc/self/{name}") for name in ("root", "ns/mnt", "ns/net", "ns/pid_for_children", "ns/user")),
        os.getpgrp(),
        os.getsid(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        os.isatty(1),
        os.isatty(2),
        {name: value for name, value in os.environ.items() if _READ_AT_START.match(name)},
    )


class Popen(popen_forkserver.Popen):
    """multiprocessing's handle of a process forked by the template. A pidfd shows its end; the template reports its exit code."""

    _fds: list[int]

    def duplicate_for_child(self, fd: int) -> int:
        # the pickled object may be temporary, such as the state of a torch generator, whose descriptor is closed with it
        return int(super().duplicate_for_child(os.dup(fd)))

    def _launch(self, process_obj: Any) -> None:
        try:
            self._start(process_obj)
        finally:
            util.close_fds(*self._fds)

    def _start(self, process_obj: Any) -> None:
        self._template = template_for(process_obj._start_method)  # kept, because it reports how the process ended
        prepared = spawn.get_preparation_data(process_obj._name)
        prepared["environment"] = _Environment()
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepared, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        data_r, data_w = os.pipe()
        self._status, status_w = os.pipe()
        fds = [self._status, data_w]
        try:
            try:
                self._template.request(process_obj.modules, [status_w, data_r, _tracker(), 1, 2, *self._fds])
            finally:
                util.close_fds(data_r, status_w)
            self.pid = forkserver.read_signed(self._status)
            try:
                self.sentinel = os.pidfd_open(self.pid)
            except ProcessLookupError:  # killed, after the template has reported its pid
                self.sentinel = os.dup(self._status)
            fds.append(self.sentinel)
            with open(data_w, "wb", closefd=False) as pipe:
                pipe.write(data.getbuffer())
        except BaseException:
            util.close_fds(*fds)
            raise
        self.finalizer = util.Finalize(self, util.close_fds, fds)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while the process runs, 255 if the code is lost, as in multiprocessing's fork server."""
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = forkserver.read_signed(self._status)
            except (OSError, EOFError):  # the template was killed, and init adopted the worker; this process may be init
                self.returncode = 255
                with suppress(ChildProcessError):
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _tracker() -> int:
    """Return the descriptor of multiprocessing's resource tracker. Restart the tracker if the program has closed its descriptor."""
    tracker = resource_tracker._resource_tracker
    if tracker._fd is not None:
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(tracker._fd).st_mode)
        except OSError:
            is_pipe = False
        if not is_pipe:  # the tracker ended when the descriptor was closed
            with suppress(ChildProcessError):
                os.waitpid(tracker._pid, 0)
            tracker._fd = tracker._pid = None
    return int(tracker.getfd())


def _popen(process: Any, plain: Any) -> Any:
    try:
        return Popen(process)
    except (OSError, EOFError) as error:
        log.debug("no template for %s (%s): it starts afresh", process.name, error)
        return plain._Popen(process)


class _Spawned(context.SpawnProcess):
    modules: tuple[str, ...] = ()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        return _popen(process_obj, context.SpawnProcess)


class _Served(context.ForkServerProcess):
    modules: tuple[str, ...] = ()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        return _popen(process_obj, context.ForkServerProcess)


_KINDS: dict[type, type[_Spawned] | type[_Served]] = {context.SpawnContext: _Spawned, context.ForkServerContext: _Served}


def process_maker(given: Any, sources: Iterable[str], *, needs_torch: bool) -> Any:
    """Return the function that makes a worker's process.

    It uses the template if the context is multiprocessing's own for spawn or forkserver; else it is the context's `Process`.

    Args:
        given: the multiprocessing context.
        sources: modules that a worker imports to unpickle its job.
        needs_torch: whether a worker needs torch even if these modules do not import it.
    """
    kind = _KINDS.get(type(given))
    if kind is None or getattr(sys, "frozen", False):
        return given.Process
    reached = _with_imported([*sources, *_main()])
    modules = FOR_ALL
    if needs_torch or "torch" in reached or _LOADER in reached:
        modules += FOR_TORCH
    if _LOADER in reached:
        modules += (_LOADER,)

    def make(**options: Any) -> Any:
        process = kind(**options)
        process.modules = modules
        return process

    return make


def _main() -> list[str]:
    """Return ["__main__"] if a worker imports it, else an empty list."""
    prepared = spawn.get_preparation_data("")
    name = prepared.get("init_main_from_name", "__main__")
    has_name = name != "__main__" and not name.endswith(".__main__")
    return ["__main__"] if has_name or "init_main_from_path" in prepared else []


def _with_imported(sources: Iterable[str]) -> set[str]:
    """Return these modules and the modules that they have imported, without entering torch.

    Imports within a function are missed; lazy imports at the top level are found. A wrong result only costs time.
    """
    seen: set[str] = set()
    queue = list(sources)
    while queue and len(seen) < _LOOKS:
        name = queue.pop()
        root = name.partition(".")[0]
        if root == "torch" or name == _LOADER:
            seen.add(root if root == "torch" else name)
        elif name not in seen and name in sys.modules and root not in _OPAQUE and name != "shmload":
            seen.add(name)
            for value in list(vars(sys.modules[name]).values()):
                if isinstance(value, types.ModuleType):
                    queue.append(value.__name__)
                elif isinstance(value, (type, types.FunctionType)) and isinstance(value.__module__, str):
                    queue.append(value.__module__)
    return seen


_LOOKS = 300  # most modules searched
_OPAQUE = sys.stdlib_module_names - {"__main__"} | {"numpy"}
