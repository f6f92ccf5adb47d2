"""/dev/shm and what is made of it: small, full, read-only, missing, littered."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import pytest

from shmload.shm.names import Host
from shmload.tools import doctor

Hosts = Callable[..., Host]
GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "free", "level", "text", "remedy"),
    [
        (8 * GIB, 7 * GIB, "good", "7.0 GiB of 8.0 GiB are free", ""),
        (64 * MIB, 64 * MIB, "advice", "64 MiB is small: a larger ring lies in a memfd", "docker run --shm-size"),
        (8 * GIB, 12 * MIB, "advice", "12 MiB of 8.0 GiB are free: rings that do not fit", "shmload clean"),
    ],
)
def test_room(host: Hosts, monkeypatch: pytest.MonkeyPatch, size: int, free: int, level: str, text: str, remedy: str) -> None:
    monkeypatch.setattr(Host, "room", lambda self, path: (size, free))
    (found,) = doctor.check_shm(host({"dev/shm/x": ""}))
    assert level == found.level
    assert text in found.text
    assert remedy in found.remedy


def test_no_dev_shm(host: Hosts) -> None:
    (found,) = doctor.check_shm(host())
    assert (found.level, found.remedy) == ("advice", "Mount a tmpfs at /dev/shm")
    assert "there is none: rings and bells lie in memfds" in found.text


def test_a_read_only_dev_shm(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_read_only", lambda path: True)
    (found,) = doctor.check_shm(host({"dev/shm/x": ""}))
    assert (found.level, found.remedy) == ("advice", "Mount it writable, mode 1777")
    assert "it cannot be written to: rings and bells lie in memfds" in found.text


def fine() -> None:
    pass


def broken() -> NoReturn:
    raise PermissionError("not\npermitted")


@pytest.mark.parametrize(
    ("segment", "memfd", "semaphore", "levels", "text"),
    [
        (fine, fine, fine, ["good", "good"], "named segments and memfds work"),
        (broken, fine, fine, ["good", "good"], "memfds work; named segments do not, and are not needed"),
        (fine, broken, fine, ["advice", "good"], "memfds do not work (not permitted): a ring that does not fit"),
        (broken, broken, fine, ["problem", "good"], "neither a named segment (not permitted) nor a memfd (not permitted)"),
        (fine, fine, broken, ["good", "problem"], "named segments and memfds work"),
    ],
)
def test_a_ring_needs_one_kind_of_segment_and_bells(
    segment: Callable[[], None], memfd: Callable[[], None], semaphore: Callable[[], None], levels: list[str], text: str
) -> None:
    found = list(doctor.check_kinds(segment, memfd, semaphore))
    assert levels == [one.level for one in found]
    assert text in found[0].text
    assert (semaphore is broken) == ("a semaphore cannot be made (not permitted)" in found[1].text)
    assert all((one.remedy == "") == (one.level == "good") for one in found)


def test_here_everything_works_and_nothing_stays() -> None:
    list(doctor.check_kinds())  # multiprocessing's resource tracker stays from the first time on
    before = set(os.listdir("/proc/self/fd"))
    assert [one.level for one in doctor.check_kinds()] == ["good", "good"]
    assert before == set(os.listdir("/proc/self/fd"))


def test_leftovers_are_counted(host: Hosts) -> None:
    stem = f"shmload-{os.getuid()}-0123456789ab-0"
    made = host({f"dev/shm/{stem}-control": "", f"dev/shm/{stem}-payload-0": "x" * (2 << 20)})
    (found,) = doctor.check_leftovers(made)
    assert (found.level, found.text) == ("advice", "1 dead loader left 2 MiB in /dev/shm")
    assert "shmload clean --yes" in found.remedy


def test_nothing_left_is_good(host: Hosts) -> None:
    (found,) = doctor.check_leftovers(host())
    assert (found.level, found.text) == ("good", "dead loaders have left nothing")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_other_users_loaders_are_told_and_no_more(host: Hosts) -> None:
    name = "dev/shm/shmload-65534-0123456789ab-0-control"
    made = host({name: "x" * (2 << 20)})
    os.chown(made.root / name, 65534, 65534)
    own, foreign = doctor.check_leftovers(made)
    assert own.level == "good"
    assert foreign.level == "advice"
    assert "other users' loaders, living or dead, hold 2 MiB" in foreign.text
