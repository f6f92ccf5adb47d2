"""Findings about a Ray cluster's nodes, without Ray, and the command around them. tests/ray uses a real cluster."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.ray.cluster_connection import unreachable_error
from shmload.ray.placement import Node
from shmload.ray.version_check import other_versions, versions
from shmload.tools import cluster_doctor
from shmload.tools.cluster_doctor import NodeState, cluster_finding, examine_cluster, node_findings
from shmload.tools.doctor import Finding

GIB = 1 << 30
SEEN: dict[str, Any] = {"host": "cpu-7", "versions": versions(), "load_failure": "", "shm": (8 * GIB, 6 * GIB)}


def state(seen: dict[str, Any] | None = None, **other: Any) -> NodeState:
    node = Node("0123456789abcdef", 4, False)
    known: dict[str, Any] = {"free_cpus": 3.0, "store": 2.0 * GIB, "free_store": 1.5 * GIB, "bytes_per_s": 533e6, **other}
    return NodeState(node, seen=SEEN if seen is None else seen, **known)


def test_healthy_node_has_only_good_findings() -> None:
    found = list(node_findings(state()))
    assert {one.level for one in found} == {"good"}
    assert [(one.check, one.text) for one in found if "versions" not in one.check] == [
        ("node 01234567 (cpu-7), actor", "starts; 3 of 4 CPUs are free"),
        ("node 01234567 (cpu-7), /dev/shm", "6.0 GiB of 8.0 GiB are free"),
        ("node 01234567 (cpu-7), object store", "1.5 GiB of 2.0 GiB are free"),
        ("node 01234567 (cpu-7), transfer", "533 MB/s"),
    ]
    (text,) = (one.text for one in found if one.check.endswith("versions"))
    assert text == ", ".join(f"{name} {version}" for name, version in versions().items())


@pytest.mark.parametrize(
    ("changed", "check", "level", "text"),
    [
        (state({**SEEN, "versions": {**versions(), "torch": "1.0"}}), "versions", "problem", "torch 1.0 where the trainer has"),
        (
            state({**SEEN, "versions": {**versions(), "shmload": ""}}),
            "versions",
            "problem",
            "shmload missing where the trainer has",
        ),
        (state({**SEEN, "load_failure": "ImportError: libc"}), "versions", "problem", "cannot be loaded there: ImportError: libc"),
        (state({**SEEN, "shm": (GIB, GIB)}), "/dev/shm", "advice", "object store has 2.0 GiB, so it is on a disk"),
        (state(free_store=0.1 * GIB), "object store", "advice", "102.4 MiB of 2.0 GiB are free"),
        (state(store=80 << 20, free_store=20 << 20), "object store", "advice", "20.0 MiB of 80.0 MiB are free"),
        (state(bytes_per_s=12e6), "transfer", "advice", "12 MB/s, less than a network of one gigabit"),
        (
            state(bytes_per_s=0.0, failure="nothing came within 60 s"),
            "transfer",
            "problem",
            "no batch came: nothing came within 60 s",
        ),
    ],
)
def test_problem_is_reported_with_a_remedy_and_the_rest_is_good(changed: NodeState, check: str, level: str, text: str) -> None:
    found = list(node_findings(changed))
    (wrong,) = (one for one in found if one.level != "good")
    assert (wrong.check, wrong.level) == (f"node 01234567 (cpu-7), {check}", level)
    assert text in wrong.text
    assert wrong.remedy
    assert len(found) == 5


def test_node_on_this_machine_needs_no_transfer() -> None:
    *_, transfer = node_findings(state(is_here=True, bytes_per_s=0.0))
    assert (transfer.level, transfer.text) == ("good", "not needed on this machine")


def test_node_without_an_actor_is_one_problem() -> None:
    (found,) = node_findings(state({}, failure="nothing came within 60 s"))
    assert (found.check, found.level) == ("node 01234567, actor", "problem")
    assert found.text == "none has started: nothing came within 60 s"


def test_cluster_without_a_free_cpu_is_advice() -> None:
    assert cluster_finding([state(), state()]) == Finding("cluster", "good", "2 nodes, 6 of 8 CPUs are free")
    full = cluster_finding([state(free_cpus=0.5)], num_going=2)
    assert (full.level, full.text) == (
        "advice",
        "1 node, 0.5 of 4 CPUs are free; 2 more will leave soon: actors wait for one, unless an autoscaler adds a node",
    )


def test_versions_are_compared_by_name() -> None:
    assert other_versions(versions()) == ""
    assert other_versions({**versions(), "Python": "2.7"}) == f"Python 2.7 where the trainer has {versions()['Python']}"


def test_missing_ray_and_missing_cluster_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]  # makes its import fail
    (found,) = examine_cluster()
    assert (found.level, found.remedy) == ("problem", 'pip install "shmload[ray]"')

    def refuse(address: str) -> None:
        raise unreachable_error(address, OSError("refused"))

    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(cluster_doctor, "join_cluster", refuse)
    (found,) = examine_cluster("head:6379")
    assert (found.level, found.text) == ("problem", str(unreachable_error("head:6379", OSError("refused"))))


@pytest.mark.parametrize(("words", "asked"), [(["--cluster"], "auto"), (["--cluster", "head:6379"], "head:6379")])
def test_command_prints_findings_and_exits_with_1_if_there_is_a_problem(
    words: list[str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []

    def examine(address: str) -> list[Finding]:
        addresses.append(address)
        return [Finding("node a, actor", "problem", "none has started", "look")]

    monkeypatch.setattr(cluster_doctor, "examine_cluster", examine)
    done = CliRunner().invoke(app, ["doctor", *words])
    assert (addresses, done.exit_code) == ([asked], 1)
    assert done.stdout.splitlines() == ["problem node a, actor: none has started", "        -> look", "1 problem"]


def test_address_without_the_cluster_option_is_an_error() -> None:
    done = CliRunner().invoke(app, ["doctor", "head:6379"])
    assert done.exit_code == 2
    assert "shmload doctor --cluster head:6379" in done.stderr
