"""Memory, cgroups, limits, processors and kernel of other machines, read from file trees and described."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmload.shm.host import Host, parse_list
from shmload.tools import doctor
from tests.doctor.conftest import finding_of

Hosts = Callable[..., Host]
GIB = 1 << 30
MIB = 1 << 20


def meminfo(nbytes: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {nbytes // 1024} kB\n"}


def v1(limit: int, used: int) -> dict[str, str]:
    folder = "sys/fs/cgroup/memory/docker/abc"
    return {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
    }


def v2(limit: int, used: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": f"{limit}\n",
        "sys/fs/cgroup/pod/memory.current": f"{used}\n",
    }


def rlimits(name: str, soft: object) -> dict[str, str]:
    return {
        "proc/self/limits": f"Limit                     Soft Limit           Hard Limit           Units\n{name:<25} {soft:<20} unlimited            x\n"
    }


def cpus(online: str, allowed: str) -> dict[str, str]:
    return {"sys/devices/system/cpu/online": online, "proc/self/status": f"Name:\tpython\nPid:\t7\nCpus_allowed_list:\t{allowed}\n"}


CPU_V2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
CPU_V1 = {
    "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
FULL_PIDS = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.max": "100", "sys/fs/cgroup/pids.current": "90"}

CASES = [
    # check, files, other arguments, level, part of the text, part of the remedy
    (doctor.check_free_memory, meminfo(8 * GIB), {}, "good", "8.0 GiB are free", ""),
    (doctor.check_free_memory, meminfo(100 * MIB), {}, "advice", "only 100.0 MiB are free", "lower prefetch_factor"),
    (doctor.check_free_memory, {}, {}, "advice", "/proc/meminfo cannot be read", "Mount /proc"),
    (doctor.check_cgroup_memory, {}, {}, "good", "no cgroup limits it", ""),
    (doctor.check_cgroup_memory, v1(8 * GIB, GIB), {}, "good", "1.0 GiB of 8.0 GiB are used (cgroup v1)", ""),
    (doctor.check_cgroup_memory, v2(8 * GIB, GIB), {}, "good", "(cgroup v2), shared memory counts; 7.0 GiB are left", ""),
    (doctor.check_cgroup_memory, v1(GIB, 900 * MIB), {}, "advice", "124.0 MiB are left: a larger ring is refused", "docker run --memory"),
    (doctor.check_cgroup_memory, v2(GIB, 2 * GIB), {}, "advice", "(cgroup v2), shared memory counts; 0 bytes are left", "limits.memory"),
    (doctor.check_open_files, {}, {}, "good", "not limited", ""),
    (doctor.check_open_files, rlimits("Max open files", 1024), {}, "good", "1,024 descriptors", ""),
    (doctor.check_open_files, rlimits("Max open files", "unlimited"), {}, "good", "not limited", ""),
    (doctor.check_open_files, rlimits("Max open files", 64), {}, "advice", "64 descriptors: enough for a few workers", "ulimit -n 4096"),
    (doctor.check_processes, rlimits("Max processes", "unlimited"), {}, "good", "enough may be started", ""),
    (doctor.check_processes, rlimits("Max processes", 20), {}, "advice", "20 processes and threads in all", "ulimit -u"),
    (doctor.check_processes, FULL_PIDS, {}, "advice", "lets 10 more processes and threads start", "--pids-limit"),
    (doctor.check_processors, cpus("0-3", "0-3"), {}, "good", "all 4 may be used", ""),
    (doctor.check_processors, cpus("0-3", "1,3"), {}, "advice", "may run on 2 of 4", "taskset"),
    (doctor.check_processors, {}, {}, "good", "all 1 may be used", ""),
    (doctor.check_processors, cpus("0-3", "0-3") | CPU_V2, {}, "advice", "gives 1.5 processors' time, while 4", "num_workers=2 or fewer"),
    (doctor.check_processors, cpus("0-7", "0-3") | CPU_V2, {}, "advice", "may run on 4 of 8: more workers than that take turns; the cgroup gives 1.5", "binding; num_workers=2 or fewer"),
    (doctor.check_processors, cpus("0-3", "0-3") | CPU_V1, {}, "advice", "gives 1.5 processors' time, while 4", "num_workers=2 or fewer"),
    (doctor.check_threads, cpus("0-3", "0-3"), {}, "good", "OMP_NUM_THREADS is not set; workers run with one", ""),
    (doctor.check_threads, cpus("0-3", "0-3") | CPU_V2, {}, "advice", "start 4 threads for 2 processors' time", "OMP_NUM_THREADS=2"),
    (doctor.check_threads, cpus("0-3", "0"), {"environ": {"OMP_NUM_THREADS": "8"}}, "advice", "OMP_NUM_THREADS=8: the trainer's", "OMP_NUM_THREADS=1"),
    (doctor.check_threads, cpus("0-3", "0-3"), {"environ": {"OMP_NUM_THREADS": "4,2"}}, "good", "OMP_NUM_THREADS=4; workers", ""),
    (doctor.check_threads, cpus("0", "0"), {"environ": {"OMP_NUM_THREADS": "many"}}, "advice", "'many' is not a number", "Set a number"),
    (doctor.check_kernel, {"proc/sys/kernel/osrelease": "6.1.0-x\n"}, {}, "good", "Linux 6.1.0-x", ""),
    (doctor.check_kernel, {"proc/sys/kernel/osrelease": "5.2.9\n"}, {}, "problem", "Linux 5.2.9 has no pidfd_open", "5.3 or newer"),
    (doctor.check_kernel, {}, {}, "advice", "cannot be read", "Mount /proc"),
    (doctor.check_proc, cpus("0", "0"), {}, "good", "it is this PID namespace's", ""),
    (doctor.check_proc, cpus("0", "0"), {"pid": 1}, "advice", "(there this is process 7, here 1)", "unshare --mount-proc"),
    (doctor.check_proc, {}, {}, "problem", "it is not mounted", "mount -t proc"),
    (doctor.check_pid_1, {"proc/1/comm": "systemd\n"}, {}, "good", "it is not a Python program", ""),
    (doctor.check_pid_1, {"proc/1/comm": "sh\n"}, {"pid": 1}, "advice", "SIGTERM does nothing to it", "docker run --init"),
    (doctor.check_pid_1, {"proc/1/comm": "python3\n"}, {}, "advice", "Python is this container's first process", "tini"),
    (doctor.check_reaper, {}, {}, "advice", "there is no /bin/sh", "shmload clean --yes"),
    (doctor.check_reaper, {"bin/sh": ""}, {}, "advice", "there is no flock command", "util-linux"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "files", "other", "level", "text", "remedy"), CASES, ids=[f"{case[0].__name__}-{case[4]}" for case in CASES]
)
def test_check_reports_the_problem_and_the_remedy(
    host: Hosts,
    check: Callable[[Host], doctor.CheckResult],
    files: dict[str, str],
    other: dict[str, object],
    level: str,
    text: str,
    remedy: str,
) -> None:
    found = finding_of(check(host(files, **other)))
    assert found.level == level
    assert text in found.text
    assert remedy in found.remedy
    assert (found.remedy == "") == (level == "good")


def test_reaper_with_its_tools_is_good(host: Hosts) -> None:
    made = host({"bin/sh": "", "bin/flock": ""}, environ={"PATH": "/usr/bin:/bin"})
    (made.root / "bin/flock").chmod(0o700)
    found = finding_of(doctor.check_reaper(made))
    assert (found.level, found.text) == ("good", "a killed trainer's memory is removed at once")


def test_nvidia_gpu_needs_torch_with_cuda(host: Hosts) -> None:
    made = host({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    without = finding_of(doctor.check_gpu(made, lambda: None))
    assert (without.level, without.remedy) == ("advice", "Install a torch with CUDA")
    assert "2 from NVIDIA, and this torch was built without CUDA" in without.text
    found = finding_of(doctor.check_gpu(made, lambda: "13.0"))
    assert (found.level, found.text) == ("good", "2 from NVIDIA")


def test_amd_gpu_is_recognized(host: Hosts) -> None:
    found = finding_of(doctor.check_gpu(host({"dev/kfd": ""}), lambda: None))
    assert (found.level, found.text) == ("good", "one or more from AMD")


def test_host_without_a_gpu_is_good(host: Hosts) -> None:
    found = finding_of(doctor.check_gpu(host(), lambda: None))
    assert (found.level, found.text) == ("good", "no GPU; loaders work without one")


def test_lists_of_processors_are_read_as_the_kernel_writes_them() -> None:
    assert {0, 1, 2, 8} == parse_list("0-2,8")
    assert set() == parse_list("")
