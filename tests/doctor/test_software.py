"""Versions, compiled modules and start methods, and the doctor command."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.shm.host import Host
from shmload.tools import doctor
from shmload.tools.doctor import Finding
from tests.doctor.conftest import finding_of

FOUND = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "posix_ipc": "1.3.2"}


def test_good_versions_are_reported() -> None:
    found = finding_of(doctor.check_versions(Host(), FOUND.__getitem__, (3, 12, 1)))
    assert (found.level, found.text) == ("good", "Python 3.12.1, torch 2.13.0+cpu, numpy 2.4.6, posix_ipc 1.3.2")


def test_old_and_missing_packages_are_problems() -> None:
    def find(name: str) -> str:
        if name == "posix_ipc":
            raise PackageNotFoundError(name)
        return {"torch": "2.5.1", "numpy": "1.26rc1"}[name]

    found = finding_of(doctor.check_versions(Host(), find, (3, 10, 0)))
    assert found.level == "problem"
    assert found.text == "Python 3.10.0 is too old; torch 2.5.1 is too old; posix_ipc is not installed"
    assert found.remedy == "Python 3.11 or newer; pip install 'torch>=2.6'; pip install posix_ipc"


def loads(*modules: str) -> Callable[[str], object]:
    def load(name: str) -> object:
        if name.rpartition(".")[2] not in modules:
            raise ImportError(name)
        return object()

    return load


def test_missing_compiled_modules_are_a_problem(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.pyi").touch()
    assert finding_of(doctor.check_compiled(Host(), tmp_path, loads("one", "two"))).text == "all 2 are there"
    found = finding_of(doctor.check_compiled(Host(), tmp_path, loads("one")))
    assert (found.level, found.text) == ("problem", "two: missing, or built for another Python or C library")
    assert "pip install" in found.remedy


def test_compiled_modules_of_this_installation_are_complete() -> None:
    assert finding_of(doctor.check_compiled(Host())).level == "good"


@pytest.mark.parametrize(
    ("method", "has_gpu", "level", "text"),
    [
        ("fork", True, "advice", "forked after CUDA was used"),
        ("fork", False, "good", "fork: the quickest"),
        ("spawn", True, "good", "spawn: workers inherit nothing from the trainer's memory"),
    ],
)
def test_start_methods(host: Callable[..., Host], method: str, has_gpu: bool, level: str, text: str) -> None:
    found = finding_of(doctor.check_start_method(host({"dev/nvidia0": ""} if has_gpu else {}), method))
    assert level == found.level
    assert text in found.text
    assert (level == "good") == (found.remedy == "")


def test_default_start_method_is_pythons(host: Callable[..., Host]) -> None:
    assert finding_of(doctor.check_start_method(host())).text.startswith(multiprocessing.get_start_method())


def test_every_check_is_run() -> None:
    assert list(doctor.CHECKS) == [one.check for one in doctor.examine(Host())]
    checks = {name for name in vars(doctor) if name.startswith("check_")}
    assert checks == {check.__name__ for check in doctor.CHECKS.values()}


def test_exception_of_a_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(host: Host) -> doctor.CheckResult:
        raise ValueError("no such line")

    monkeypatch.setitem(doctor.CHECKS, "memory", breaks)
    found = {one.check: one for one in doctor.examine(Host())}
    assert found["memory"].text == "could not be checked: ValueError: no such line"
    assert found["versions"].level == "good"


GOOD = Finding("memory", "good", "8 GiB are free")
ADVICE = Finding("open files", "advice", "64 descriptors", "ulimit -n 4096")
PROBLEM = Finding("kernel", "problem", "Linux 4 has no pidfd_open", "a newer one")


def run(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], *arguments: str) -> Any:
    monkeypatch.setattr(doctor, "examine", lambda host: findings)
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_command_prints_all_findings_and_exits_with_1_if_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [GOOD, ADVICE, PROBLEM])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "good    memory: 8 GiB are free",
        "advice  open files: 64 descriptors",
        "        -> ulimit -n 4096",
        "problem kernel: Linux 4 has no pidfd_open",
        "        -> a newer one",
        "1 problem, advice on 1",
    ]


def test_advice_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [GOOD, ADVICE])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "no problems, advice on 1")


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [GOOD, PROBLEM], "--json")
    assert done.exit_code == 1
    assert [asdict(GOOD), asdict(PROBLEM)] == json.loads(done.stdout)
