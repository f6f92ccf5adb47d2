"""All checks, one after the other. One that fails itself is a finding, not an end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import shmload
from shmload.shm.host import Host
from shmload.tools.doctor import checks
from shmload.tools.doctor.checks import Finding

CORE = Path(shmload.__file__).parent / "_core"


def examine(host: Host) -> list[Finding]:
    """What every check says of a host, in the order in which things would go wrong."""
    found: list[Finding] = []
    for name, check in _checks(host):
        try:
            found += check()
        except Exception as error:  # a check reads what other kernels write: it must not hide the others' findings
            found.append(
                Finding(name, "advice", f"could not be checked: {type(error).__name__}: {error}", "Please report it")
            )
    return found


def _checks(host: Host) -> Iterable[tuple[str, Callable[[], Iterable[Finding]]]]:
    yield "versions", checks.check_versions
    yield "compiled modules", partial(checks.check_compiled, CORE)
    yield "kernel", partial(checks.check_kernel, host)
    yield "/proc", partial(checks.check_proc, host)
    yield "PID 1", partial(checks.check_pid_1, host)
    yield "/dev/shm", partial(_shared_memory, "check_shm", host)
    yield "segments", partial(_shared_memory, "check_kinds")
    yield "leftovers", partial(_shared_memory, "check_leftovers", host)
    yield "huge pages", partial(_shared_memory, "check_huge_pages", host)
    yield "reaper", partial(checks.check_reaper, host)
    yield "memory", partial(checks.check_free_memory, host)
    yield "cgroup memory", partial(checks.check_cgroup_memory, host)
    yield "open files", partial(checks.check_open_files, host)
    yield "locked memory", partial(checks.check_locked_memory, host)
    yield "processes", partial(checks.check_processes, host)
    yield "processors", partial(checks.check_processors, host)
    yield "threads", partial(checks.check_threads, host)
    yield "start method", lambda: checks.check_start_method(checks.has_gpu(host))
    yield "GPU", lambda: checks.check_gpu(host, _cuda_of_torch())


def _shared_memory(check: str, *host: Host) -> Iterable[Finding]:
    from shmload.tools.doctor import shared_memory  # here: it may not even be importable where nothing is built

    function: Callable[..., Iterable[Finding]] = getattr(shared_memory, check)
    return function(*host)


def _cuda_of_torch() -> str | None:
    try:
        from torch.version import cuda
    except ImportError:
        return None
    return str(cuda) if cuda else None
