"""Checks of shared memory: is there room, do segments, memfds and semaphores work, what lies about, how are pages made."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

from shmload.shm import janitor
from shmload.shm.host import Host
from shmload.shm.names import STEM_PATTERN, new_stem
from shmload.tools.doctor.checks import Finding, mib

SMALL_NBYTES = 512 << 20  # docker gives 64 MiB where nobody asks; a ring of photos in batches takes a few hundred
SHM_SIZE = (
    "Give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
)


def check_shm(host: Host) -> Iterator[Finding]:
    """Size, room and rights of /dev/shm."""
    path = host.root / "dev/shm"
    room = host.room("dev/shm")
    if room is None or not path.is_dir():
        yield Finding(
            "/dev/shm",
            "advice",
            "there is none: rings and bells lie in memfds; a SharedIndex with a name has no place to meet at",
            "Mount a tmpfs at /dev/shm",
        )
        return
    size, free = room
    if not os.access(path, os.W_OK) or _is_read_only(path):
        yield Finding(
            "/dev/shm",
            "advice",
            "it cannot be written to: rings and bells lie in memfds; a SharedIndex with a name has no place to meet at",
            "Mount it writable, mode 1777",
        )
    elif free < size / 10 or free < 16 << 20:
        yield Finding(
            "/dev/shm",
            "advice",
            f"{mib(free)} of {mib(size)} are free: rings that do not fit lie in memfds; other programs "
            "may be refused or killed by SIGBUS",
            "See what lies there: ls -lS /dev/shm; shmload clean removes what dead loaders have left",
        )
    elif size < SMALL_NBYTES:
        yield Finding(
            "/dev/shm",
            "advice",
            f"{mib(size)} is small: a larger ring lies in a memfd; torch's own DataLoader would be killed by SIGBUS",
            SHM_SIZE,
        )
    else:
        yield Finding("/dev/shm", "good", f"{mib(free)} of {mib(size)} are free")


def _is_read_only(path: os.PathLike[str]) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def try_segment() -> None:
    """Makes a named segment and removes it."""
    from shmload.shm.segment import Segment

    Segment.create(f"{new_stem()}-doctor", 4096, kind="shm").close()


def try_memfd() -> None:
    """Makes a memfd, opens it as a worker would, and lets it go."""
    from shmload.shm.segment import Segment, open_segment

    segment = Segment.create("shmload-doctor", 4096, kind="memfd")
    try:
        os.close(open_segment(segment.path))
    finally:
        segment.close()


def try_semaphore() -> None:
    """Makes a semaphore as a loader would, rings it and lets it go."""
    from shmload.shm.group import Doorbell

    bell = Doorbell.create(f"/{new_stem()}-doctor")
    try:
        bell.post()
        if not bell.wait(0):
            raise OSError("a post was lost")
    finally:
        bell.close()


def check_kinds(
    segment: Callable[[], None] = try_segment,
    memfd: Callable[[], None] = try_memfd,
    semaphore: Callable[[], None] = try_semaphore,
) -> Iterator[Finding]:
    """Tries what a loader is made of: a ring needs one of the two kinds of segment, and bells."""
    no_segment, no_memfd, no_bell = _fails(segment), _fails(memfd), _fails(semaphore)
    if no_segment and no_memfd:
        yield Finding(
            "segments",
            "problem",
            f"no loader with workers can start: neither a named segment ({no_segment}) nor a memfd ({no_memfd}) can be made",
            "Make /dev/shm writable, or permit memfd_create and /proc/<pid>/fd in the container's security profile",
        )
    elif no_memfd:
        yield Finding(
            "segments",
            "advice",
            f"memfds do not work ({no_memfd}): a ring that does not fit into /dev/shm is refused",
            "Permit memfd_create and mount /proc, or make /dev/shm large",
        )
    elif no_segment:
        yield Finding("segments", "good", "memfds work; named segments do not, and are not needed")
    else:
        yield Finding("segments", "good", "named segments and memfds work")
    if no_bell:
        yield Finding(
            "semaphores",
            "problem",
            f"no loader with workers can start: a semaphore cannot be made ({no_bell})",
            "Make /dev/shm writable, or permit memfd_create in the container's security profile",
        )
    else:
        yield Finding("semaphores", "good", "they work")


def _fails(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def check_leftovers(host: Host) -> Iterator[Finding]:
    """What dead loaders of this user have left, and what other users hold."""
    folder = str(host.root / "dev/shm")
    found = janitor.find_leftovers(folder)
    if found:
        yield Finding(
            "leftovers",
            "advice",
            f"{len(found)} dead loader{'s' * (len(found) > 1)} left {mib(sum(one.nbytes for one in found))} in /dev/shm",
            "Remove them: shmload clean --yes (the next loader to start does it, too)",
        )
    else:
        yield Finding("leftovers", "good", "dead loaders have left nothing")
    foreign = _foreign_bytes(folder)
    if foreign:
        yield Finding(
            "leftovers",
            "advice",
            f"other users' loaders, living or dead, hold {mib(foreign)} of /dev/shm; they are theirs to remove",
        )


def _foreign_bytes(folder: str) -> int:
    nbytes = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if STEM_PATTERN.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) and status.st_uid != os.getuid():
                    nbytes += status.st_blocks * 512
    except OSError:  # no folder, or what was listed has gone
        pass
    return nbytes


def check_huge_pages(host: Host) -> Iterator[Finding]:
    """Whether the kernel makes huge pages of shared memory."""
    setting = host.text("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if setting is None:
        yield Finding("huge pages", "good", "this kernel has none for shared memory; none are needed")
        return
    chosen = setting.partition("[")[2].partition("]")[0] or setting
    if chosen in ("always", "force"):
        yield Finding(
            "huge pages",
            "advice",
            f"shmem_enabled is {chosen}: small segments may take 2 MiB each of a container's memory",
            "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled, as root on the host",
        )
    else:
        yield Finding("huge pages", "good", f"shmem_enabled is {chosen}")
