"""The environment of a rank, and the port that is reserved for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.launch.environment import NodePlace, environment, held_port
from shmload.launch.rank_specs import number_of_ranks, rank_specs
from shmload.processes.ranks import rank_and_world_size
from shmload.shm.host import Host

PLACE = NodePlace("127.0.0.1", 1234, "run")


def test_environment_of_a_rank_equals_torchruns() -> None:
    variables = environment(NodePlace("there", 5, "run", num_nodes=3, node_rank=2), 1, 4, inherited={})
    assert {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"} == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "9",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "there",
        "MASTER_PORT": "5",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def test_variables_of_an_outer_launcher_are_dropped() -> None:
    outer = {
        **environment(PLACE, 3, 4, cpus=(1, 2)),
        "TORCHELASTIC_ERROR_FILE": "error",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOME": "/home",
    }
    variables = environment(NodePlace("127.0.0.1", 9, "inner"), 0, 1, inherited=outer)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_PORT"], variables["HOME"]) == ("0", "1", "9", "/home")
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert not {"TORCHELASTIC_ERROR_FILE", "SHMLOAD_RANK_CPUS"} & variables.keys()


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "given", "threads"),
    [(4, (), {}, "6"), (30, (), {}, "1"), (4, (1, 2), {}, None), (1, (), {}, None), (4, (), {"OMP_NUM_THREADS": "3"}, "3")],
)
def test_ranks_without_their_own_cpus_share_threads(
    num_ranks: int, cpus: tuple[int, ...], given: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP counts the CPUs of a pinned rank by itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    assert threads == environment(PLACE, 0, num_ranks, cpus, given).get("OMP_NUM_THREADS")


def test_loader_reads_rank_and_world_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(PLACE, 2, 3).items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == (2, 3)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_rank_0_can_bind_a_held_port(family: socket.AddressFamily) -> None:
    held = held_port()
    port = held.getsockname()[1]
    address = "127.0.0.1" if family == socket.AF_INET else "::"
    try:
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, port))
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()
    finally:
        held.close()
    with socket.socket(family) as other:
        other.bind((address, port))


def test_held_ports_differ_and_are_not_given_to_other_programs() -> None:
    held = [held_port() for _ in range(200)]
    given = [socket.socket() for _ in range(200)]
    try:
        for other in given:
            other.bind(("127.0.0.1", 0))
        ports = [port.getsockname()[1] for port in held] + [other.getsockname()[1] for other in given]
        assert len(set(ports)) == 400
    finally:
        for end in [*held, *given]:
            end.close()


class WithoutAddress(socket.socket):
    """A socket on a machine whose kernel supports IPv6, although no interface has an IPv6 address."""

    def bind(self, address: Any) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        super().bind(address)


@pytest.mark.parametrize("missing", ["family", "address"])
def test_port_is_held_without_ipv6(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "family":
        monkeypatch.setattr(socket, "AF_INET6", 12345)
    else:
        monkeypatch.setattr(socket, "socket", WithoutAddress)
    held = held_port()
    try:
        assert held.getsockname()[1] > 0
    finally:
        held.close()


def test_rank_specs_divide_the_allowed_cpus(tmp_path: Path) -> None:
    found = rank_specs(PLACE, 2, Host(tmp_path, {}), allowed=[3, 5, 6], logs=tmp_path / "logs")
    assert [rank_spec.cpus for rank_spec in found] == [(3, 5), (6,)]
    assert [rank_spec.environ["SHMLOAD_RANK_CPUS"] for rank_spec in found] == ["2", "1"]
    assert [rank_spec.log for rank_spec in found] == [str(tmp_path / f"logs/rank_{rank}.log") for rank in range(2)]
    assert {rank_spec.cpus for rank_spec in rank_specs(PLACE, 2, Host(tmp_path, {}), pin=False)} == {()}


def test_rank_specs_are_near_their_gpus(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1", "2-3")):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text(cpus)
    for address, node in (("0000:10:00.0", 1), ("0000:20:00.0", 0)):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address / "numa_node").write_text(str(node))
    host = Host(tmp_path, {})
    assert [rank_spec.cpus for rank_spec in rank_specs(PLACE, 2, host, allowed=range(4))] == [(2, 3), (0, 1)]
    four = [rank_spec.cpus for rank_spec in rank_specs(PLACE, 4, host, allowed=range(4))]
    assert four == [(0,), (1,), (2,), (3,)], "with more ranks than devices, their assignment is unknown"


def test_default_number_of_ranks_is_one_per_device(tmp_path: Path) -> None:
    assert number_of_ranks(None, Host(tmp_path)) == 1
    assert number_of_ranks(5, Host(tmp_path)) == 5
    assert number_of_ranks(np.int64(5), Host(tmp_path)) == 5  # type: ignore[arg-type]  # a numpy integer
    for wrong in (0, 2.0, "2"):
        with pytest.raises(ValueError, match=f"nprocs is a number of processes from 1 up, or None .*; got {wrong!r}"):
            number_of_ranks(wrong, Host(tmp_path))  # type: ignore[arg-type]  # must be refused


def test_error_says_why_no_port_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("shmload.launch.environment.socket.socket", refuse)
    with pytest.raises(OSError, match=r"no port of this machine can be bound: .*Too many open files"):
        held_port()
