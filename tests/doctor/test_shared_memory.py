"""Findings about /dev/shm: small, full, read-only, missing, with leftovers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import pytest

from shmload.shm.host import Host
from shmload.tools import doctor
from tests.doctor.conftest import finding_of

Hosts = Callable[..., Host]
GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "free", "level", "text", "remedy"),
    [
        (8 * GIB, 7 * GIB, "good", "7.0 GiB of 8.0 GiB are free", ""),
        (64 * MIB, 64 * MIB, "advice", "64.0 MiB is small: a larger ring is in a memfd", "docker run --shm-size"),
        (8 * GIB, 12 * MIB, "advice", "12.0 MiB of 8.0 GiB are free: rings that do not fit", "shmload clean"),
    ],
)
def test_size_and_free_memory_of_dev_shm(
    host: Hosts, monkeypatch: pytest.MonkeyPatch, size: int, free: int, level: str, text: str, remedy: str
) -> None:
    monkeypatch.setattr(Host, "room", lambda self, path: (size, free))
    found = finding_of(doctor.check_shm(host({"dev/shm/x": ""})))
    assert level == found.level
    assert text in found.text
    assert remedy in found.remedy


def test_missing_dev_shm(host: Hosts) -> None:
    found = finding_of(doctor.check_shm(host()))
    assert (found.level, found.remedy) == ("advice", "Mount a tmpfs at /dev/shm")
    assert "there is none: rings and doorbells are in memfds" in found.text


def test_read_only_dev_shm(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_read_only", lambda path: True)
    found = finding_of(doctor.check_shm(host({"dev/shm/x": ""})))
    assert (found.level, found.remedy) == ("advice", "Mount it writable, mode 1777")
    assert "it cannot be written to: rings and doorbells are in memfds" in found.text


def fine() -> None:
    pass


def broken() -> NoReturn:
    raise PermissionError("not\npermitted")


@pytest.mark.parametrize(
    ("named", "memfd", "level", "text"),
    [
        (fine, fine, "good", "named segments and memfds work"),
        (broken, fine, "good", "memfds work; named segments do not, and are not needed"),
        (fine, broken, "advice", "memfds do not work (not permitted): a ring that does not fit"),
        (broken, broken, "problem", "neither a named segment (not permitted) nor a memfd (not permitted)"),
    ],
)
def test_ring_needs_at_least_one_kind_of_segment(
    named: Callable[[], None], memfd: Callable[[], None], level: str, text: str
) -> None:
    found = finding_of(doctor.check_segments(Host(), named, memfd))
    assert found.level == level
    assert text in found.text
    assert (found.remedy == "") == (level == "good")


def test_ring_needs_semaphores() -> None:
    found = finding_of(doctor.check_semaphores(Host(), broken))
    assert (found.level, "a semaphore cannot be made (not permitted)" in found.text) == ("problem", True)
    assert finding_of(doctor.check_semaphores(Host(), fine)).level == "good"


def test_checks_on_this_host_are_good_and_leave_no_descriptor() -> None:
    def levels() -> list[str]:
        return [finding_of(check(Host())).level for check in (doctor.check_segments, doctor.check_semaphores)]

    levels()  # multiprocessing's resource tracker stays after the first time
    before = set(os.listdir("/proc/self/fd"))
    assert levels() == ["good", "good"]
    assert before == set(os.listdir("/proc/self/fd"))


def test_leftovers_are_counted(host: Hosts) -> None:
    stem = f"shmload-{os.getuid()}-0123456789ab-0"
    made = host({f"dev/shm/{stem}-control": "", f"dev/shm/{stem}-payload-0": "x" * (2 << 20)})
    found = finding_of(doctor.check_leftovers(made))
    assert (found.level, found.text) == ("advice", "1 dead loader left 2.0 MiB in /dev/shm")
    assert "shmload clean --yes" in found.remedy


def test_nothing_left_is_good(host: Hosts) -> None:
    found = finding_of(doctor.check_leftovers(host()))
    assert (found.level, found.text) == ("good", "dead loaders have left nothing")
