"""The topology of machines from generated files of /sys and the GPU driver."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from shmload.launch.topology import Core, cores, device_nodes, num_devices
from shmload.shm.host import Host


def host(root: Path, files: dict[str, str], **environ: str) -> Host:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return Host(root, environ)


TWO_NODES = {
    "sys/devices/system/node/node0/cpulist": "0-1,4-5",
    "sys/devices/system/node/node1/cpulist": "2-3,6-7",
    **{f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)},
}


def test_cores_are_read_by_node_with_their_threads(tmp_path: Path) -> None:
    found = cores(host(tmp_path, TWO_NODES), range(8))
    assert found == [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    """taskset, a cpuset or a rank's own share leave such cores: half a core counts as a core with one thread."""
    assert cores(host(tmp_path, TWO_NODES), {1, 2, 6}) == [Core(0, (1,)), Core(1, (2, 6))]


def test_missing_topology_means_one_node_of_single_threaded_cores(tmp_path: Path) -> None:
    assert cores(Host(tmp_path), {3, 5}) == [Core(0, (3,)), Core(0, (5,))]


GPUS = {
    **{
        f"proc/driver/nvidia/gpus/{address}/information": f"Model: \t A\nGPU UUID: \t GPU-{name}-0000\nBus: x"
        for address, name in (("0000:3B:00.0", "aa"), ("0000:86:00.0", "bb"), ("0000:AF:00.0", "bc"))
    },
    "sys/bus/pci/devices/0000:3b:00.0/numa_node": "0",
    "sys/bus/pci/devices/0000:86:00.0/numa_node": "1",
    "sys/bus/pci/devices/0000:af:00.0/numa_node": "-1",
}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1, None]), ("1,0", [1, 0]), ("2", [None]), ("", []), ("7", []), ("GPU-bb", []), ("MIG-12", [])],
)
def test_devices_belong_to_the_nodes_of_their_pci_addresses(
    tmp_path: Path, visible: str | None, expected: list[int | None]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert expected == device_nodes(host(tmp_path, GPUS, **environ))


def test_without_a_driver_there_is_no_device_and_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert num_devices(Host(tmp_path)) == 0
    assert device_nodes(Host(tmp_path)) == []


def test_with_a_driver_torch_counts_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: 5))
    monkeypatch.setitem(sys.modules, "torch", counting)
    assert num_devices(host(tmp_path, {"dev/nvidiactl": ""})) == 5
