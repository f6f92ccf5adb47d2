"""Segments: fully reserved, private, removed when closed, in memfds if /dev/shm has no room."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shmload._core.mapping import Mapping
from shmload.errors import RingTooSmall
from shmload.processes import private_fds
from shmload.shm.names import SHM_DIR, new_stem, process_stem
from shmload.shm.segment import Segment, memfd_path, open_segment
from shmload.shm.segment_group import SegmentGroup
from tests.shm.mount_kit import READ_ONLY, in_mount_namespace, needs_unshare, of_size

MIB = 1 << 20


def test_mappings_share_their_memory() -> None:
    segment = Segment.create(new_stem() + "-a", 3 * MIB)
    attached = open_segment(segment.path)
    memoryview(Mapping(segment.fd, 3 * MIB))[MIB : MIB + 4] = b"abcd"
    assert bytes(memoryview(Mapping(attached, 3 * MIB))[MIB : MIB + 4]) == b"abcd"
    os.close(attached)
    segment.close()
    assert not os.path.exists(segment.path)


def test_segment_is_private_and_reserved() -> None:
    segment = Segment.create(new_stem() + "-a", 2 * MIB)
    status = os.stat(segment.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 2 * MIB
    segment.close()


@pytest.mark.parametrize("kind", ["shm", "memfd"])
def test_interrupted_creation_leaves_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    before, files = os.listdir("/proc/self/fd"), os.listdir(SHM_DIR)
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Segment.create(new_stem() + "-a", MIB, kind=kind)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert {name for name in os.listdir(SHM_DIR) if name.startswith(process_stem())} <= set(files)


def test_mapping_outlives_its_segment() -> None:
    segment = Segment.create(new_stem() + "-a", 4096)
    memory = memoryview(Mapping(segment.fd, 4096))
    segment.close()
    segment.close()
    memory[0] = 7
    assert memory[0] == 7


def test_memfd_is_attached_through_its_owner() -> None:
    segment = Segment.create("shmload-x", 4096, kind="memfd")
    memoryview(Mapping(segment.fd, 4096))[0] = 9
    attached = open_segment(segment.path)
    assert memoryview(Mapping(attached, 4096))[0] == 9
    os.close(attached)
    segment.close()


def test_reused_descriptor_is_not_mistaken_for_the_first_segment() -> None:
    first = Segment.create("shmload-x-payload-1", 4096, kind="memfd")
    number = first.fd
    first.close()
    second = Segment.create("shmload-x-payload-12", 4096, kind="memfd")
    try:
        assert second.fd == number, "the system must reuse the lowest free number"
        with pytest.raises(FileNotFoundError, match="its owner has closed it"):
            open_segment(first.path)
        os.close(open_segment(second.path))
        with pytest.raises(FileNotFoundError):
            open_segment(memfd_path("payload-12", number))
    finally:
        second.close()


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="is not a segment of user"):
        open_segment(str(tmp_path) if os.path.isfile(str(tmp_path)) else "/dev/null")


def test_forked_child_neither_removes_nor_keeps_its_parents_segment() -> None:
    segment = Segment.create(new_stem() + "-a", 4096)
    pid = os.fork()
    if pid == 0:
        segment.close()
        os._exit(1 if segment.fd in private_fds._descriptors else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.path.exists(segment.path)
    segment.close()


def test_forked_child_keeps_no_segment_after_the_program_closed_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = os.pipe()
    monkeypatch.setattr(private_fds, "_descriptors", {})
    private_fds.keep(first)
    private_fds.keep(second)  # after the one that is closed
    os.close(first)
    pid = os.fork()
    if pid == 0:
        os._exit(os.path.exists(f"/proc/self/fd/{second}"))
    os.close(second)
    assert os.waitpid(pid, 0)[1] == 0


def test_descriptors_do_not_accumulate() -> None:
    SegmentGroup().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        group = SegmentGroup()
        group.segment("control", 4096)
        group.doorbell("ready")
        group.close()
    assert len(os.listdir("/proc/self/fd")) == before


CHILD = """
import os, sys
from shmload.shm.segment_group import SegmentGroup
from shmload.shm.segment import Segment
from shmload.shm.names import new_stem
from shmload.errors import RingTooSmall
from shmload._core.mapping import Mapping
group = SegmentGroup()
"""


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code after CHILD's code in another process."""
    return subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def with_memory(script: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code after CHILD's code in a mount namespace that `script` has prepared."""
    return in_mount_namespace(script, "-c", CHILD + textwrap.dedent(code))


@needs_unshare
def test_ring_larger_than_dev_shm_uses_a_memfd() -> None:
    done = with_memory(
        of_size("64m"),
        """
        segment = group.segment("payload", 100 << 20)
        memory = memoryview(Mapping(segment.fd, 100 << 20))
        memory[::4096] = bytes(len(memory[::4096]))
        print(segment.kind, group.segment("control", 4096).kind, len(os.listdir("/dev/shm")))
        group.close()
        """,
    )
    assert done.stdout.split() == ["memfd", "shm", "1"], done.stderr


@needs_unshare
def test_named_segment_larger_than_dev_shm_is_refused_with_figures() -> None:
    done = with_memory(
        of_size("64m"),
        """
        for nbytes in (100 << 20, 63 << 20, 40 << 20):
            try:
                group.segment("payload-%d" % nbytes, nbytes, kind="shm", slots=(10, nbytes // 10))
            except RingTooSmall as error:
                print(error)
        print(sorted(os.listdir("/dev/shm")))
        """,
    )
    lines = done.stdout.splitlines()
    assert f"/dev/shm has {64 * MIB} bytes free, the ring needs {100 * MIB}" in lines[0], done.stderr
    assert f"10 slots of {10 * MIB} bytes, of which 6 would fit" in lines[0]
    assert "Enlarge it" in lines[0]
    assert "of which" in lines[1], lines
    assert len(lines) == 3


@needs_unshare
def test_read_only_dev_shm_leads_to_memfds() -> None:
    done = with_memory(READ_ONLY, 'print(group.segment("control", 4096).kind)')
    assert done.stdout.split() == ["memfd"], done.stderr


def test_ring_beyond_the_file_size_limit_is_refused_with_the_remedy_only() -> None:
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for kind in ("auto", "shm"):
        try:
            group.segment("payload-" + kind, 8192, kind=kind)
        except RingTooSmall as error:
            print(error)
    """
    done = in_child(code)
    assert done.stderr == ""
    assert done.stdout.startswith(
        "cannot create a segment of 8192 bytes: File too large: raise the limit on file sizes (ulimit -f)\n"
    )


def test_lack_of_descriptors_is_not_reported_as_a_lack_of_memory() -> None:
    code = """
    import os, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), 4096))
    for kind in ("auto", "shm", "memfd"):
        try:
            group.segment("payload-" + kind, 8192, kind=kind)
        except OSError as error:
            print(error)
    """
    done = in_child(code)
    assert done.stderr == ""
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == ["[Errno 24] Too many open files"] * 3
    assert "ulimit -n" in done.stdout


def test_segment_larger_than_memory_is_refused() -> None:
    with pytest.raises(RingTooSmall, match="bytes"):
        Segment.create(new_stem() + "-a", 1 << 50, kind="memfd")


def test_segment_starts_no_helper_of_multiprocessing() -> None:
    code = """
    from multiprocessing import resource_tracker
    segment = group.segment("payload-0", 4096)
    print(segment.kind, resource_tracker._resource_tracker._pid)
    """
    done = in_child(code)
    assert done.stdout.split() == ["shm", "None"], done.stderr
