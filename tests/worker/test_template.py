"""Workers started by spawn and forkserver are forks of a template, and behave as freshly started processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from shmload import ShmLoader
from shmload.worker import template
from shmload.worker.template import process_maker, template_for
from tests.faults.faults_kit import program_env
from tests.worker import template_kit

pytestmark = pytest.mark.slow(reason="starts templates, which import numpy, and some torch")

METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])
DEADLINE_S = 60
MOST_MIB = (
    60 if sysconfig.get_config_var("Py_GIL_DISABLED") else 20
)  # private memory of a worker; without the GIL, 54 were measured


@pytest.fixture(autouse=True)
def no_template_before() -> Iterator[None]:
    template._current = None
    yield
    template._current = None


def started(method: str, target: Callable[..., None], *args: Any, modules: tuple[str, ...] = ()) -> Any:
    """Starts a process through the template."""
    process = process_maker(multiprocessing.get_context(method), modules, needs_torch=False)(
        target=target, args=args, daemon=True, name="a worker"
    )
    process.start()
    return process


def report_of(method: str, **options: Any) -> dict[str, Any]:
    """Returns what such a process reports about itself."""
    ours, theirs = multiprocessing.Pipe()
    process = started(method, template_kit.send_report, theirs, **options)
    theirs.close()
    assert ours.poll(DEADLINE_S)
    found: dict[str, Any] = ours.recv()
    process.join()
    found["exitcode"] = process.exitcode
    process.close()
    return found


def await_end(pid: int) -> bool:
    """Returns whether a process ends in time, even if it is not a child of this one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(DEADLINE_S * 1000))
    finally:
        os.close(pidfd)


def template_pid() -> int:
    assert template._current is not None
    return template._current.process.pid


@METHODS
def test_workers_are_forks_of_one_template_with_multiprocessings_attributes(method: str) -> None:
    first, second = report_of(method), report_of(method)
    assert first["ppid"] == second["ppid"] == template_pid()
    assert first["parent"] == os.getpid()
    assert (first["name"], first["is_daemon"], first["method"], first["exitcode"]) == ("a worker", True, method, 0)
    assert first["authkey"] == bytes(multiprocessing.current_process().authkey)
    assert first["takes_int"]
    assert first["argv"] == sys.argv
    assert "torch" not in first["modules"]
    assert first["private_mib"] <= MOST_MIB
    assert multiprocessing.active_children() == []


@METHODS
def test_current_environment_and_folder_reach_a_worker(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_WORD", "early")
    assert report_of(method)["environ"] == dict(os.environ)
    monkeypatch.setenv("SOME_OTHER", "caf\udce9")
    monkeypatch.delenv("SOME_WORD")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = report_of(method)
    assert (found["environ"], found["cwd"], found["path"]) == (dict(os.environ), str(tmp_path), sys.path)
    assert found["ppid"] == template_pid()


def test_output_goes_to_the_trainers_current_output(tmp_path: Path) -> None:
    report_of("spawn")
    before = template_pid()
    kept = os.dup(1)
    with open(tmp_path / "log", "w") as log:
        os.dup2(log.fileno(), 1)
    try:
        assert report_of("spawn")["output"] == str(tmp_path / "log")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert template_pid() == before


@pytest.mark.parametrize("what", ["umask", "limit", "signal", "affinity", "variable"])
def test_changed_process_attributes_start_a_new_template(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = report_of("spawn")
    soft, hard = resource.getrlimit(template_kit.LIMIT)
    umask, handler, affinity = os.umask(0o077), signal.getsignal(signal.SIGUSR1), os.sched_getaffinity(0)
    os.umask(umask)
    try:
        if what == "umask":
            os.umask(umask ^ 0o007)
        elif what == "limit":
            resource.setrlimit(template_kit.LIMIT, (4096 if soft == 0 else 0, hard))
        elif what == "signal":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        elif what == "affinity":
            os.sched_setaffinity(0, {min(affinity)})
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", "3")
        now = report_of("spawn")
    finally:
        os.umask(umask)
        resource.setrlimit(template_kit.LIMIT, (soft, hard))
        signal.signal(signal.SIGUSR1, handler)
        os.sched_setaffinity(0, affinity)
    keys = {"umask": "umask", "limit": "limit", "signal": "ignores_usr1", "affinity": "affinity", "variable": "environ"}
    if what != "affinity" or len(affinity) > 1:
        assert now[keys[what]] != before[keys[what]]
        assert now["ppid"] != before["ppid"]
    assert now["ppid"] == template_pid()


@METHODS
def test_generators_seeded_at_import_differ_between_workers(method: str) -> None:
    template_for(method).request(["numpy.random"])
    drawn = [number for _ in range(2) for number in report_of(method)["random"]]
    assert len(set(drawn)) == len(drawn)


def test_worker_has_no_descriptors_of_the_template_or_of_other_workers() -> None:
    ours, theirs = multiprocessing.Pipe()
    other = started("spawn", template_kit.wait_for, theirs)
    assert ours.recv() == "up"
    pipes = [name for name in report_of("spawn")["descriptors"] if name.startswith(("socket:", "anon_inode:"))]
    assert len(pipes) == 1  # the one for its answer
    ours.send("go")
    other.join()
    assert other.exitcode == 0


@METHODS
def test_worker_runs_exit_handlers_and_flushes_its_output(method: str, tmp_path: Path) -> None:
    kept = os.dup(1)
    with open(tmp_path / "output", "w") as output:
        os.dup2(output.fileno(), 1)
    try:
        process = started(method, template_kit.write_at_exit, str(tmp_path / "word"), "done")
        process.join()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert [(tmp_path / name).read_text() for name in ("word", "output")] == ["done", "done"]


@METHODS
def test_exit_code_of_a_killed_worker_is_its_signal(method: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = started(method, template_kit.wait_for, theirs)
    assert ours.recv() == "up"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@METHODS
def test_workers_survive_a_killed_template_and_the_next_start_makes_another(method: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = started(method, template_kit.wait_for, theirs)
    assert ours.recv() == "up"
    before = template_pid()
    os.kill(before, signal.SIGKILL)
    template._current.process.wait()  # type: ignore[union-attr]  # there is one
    assert process.is_alive()
    assert report_of(method)["ppid"] == template_pid() != before
    ours.send("go")
    process.join()
    assert process.exitcode == 255
    assert not psutil.pid_exists(before)


def test_worker_of_a_killed_template_can_be_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = started("spawn", template_kit.wait_for, theirs)
    assert ours.recv() == "up"
    os.kill(template_pid(), signal.SIGKILL)
    template._current.process.wait()  # type: ignore[union-attr]  # there is one
    assert process.exitcode is None
    process.kill()
    process.join()
    assert await_end(process.pid)


@METHODS
def test_workers_start_without_a_template_if_it_is_killed_during_a_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current = template_for(method)
    os.kill(current.process.pid, signal.SIGSTOP)
    request = template.Template.request

    def request_and_kill(self: Any, modules: Any, fds: Any = ()) -> None:
        request(self, modules, fds)
        self.process.kill()

    monkeypatch.setattr(template.Template, "request", request_and_kill)
    found = report_of(method)
    assert found["ppid"] != current.process.pid
    assert found["exitcode"] == 0


@METHODS
@pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
def test_pass_loses_nothing_when_its_template_is_killed(method: str, seed: int | None) -> None:
    with ShmLoader(template_kit.Rows(64), 4, num_workers=2, seed=seed, shuffle=False, multiprocessing_context=method) as loader:
        for number in range(2):
            rows = []
            for step, batch in enumerate(loader):
                if step == 2:
                    os.kill(template_pid(), signal.SIGKILL)
                    if seed is not None and number == 0:  # a worker is killed and replaced, too
                        os.kill(loader._builder.last.pool.pids[0], signal.SIGKILL)  # type: ignore[union-attr]  # there is one
                rows += batch[:, 0].tolist()
            assert rows == list(range(64))
        workers = [worker["pid"] for worker in loader.stats()["workers"]] if seed is not None else []
        assert all(psutil.pid_exists(pid) for pid in workers)


def test_users_preloaded_modules_are_only_in_the_forkserver_template() -> None:
    before = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(["colorsys"])
    try:
        assert "colorsys" in report_of("forkserver")["modules"]
        assert "colorsys" not in report_of("spawn")["modules"]
    finally:
        multiprocessing.set_forkserver_preload(before)


def test_template_with_a_second_thread_is_not_forked() -> None:
    before = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(["tests.worker.threaded_kit"])
    try:
        found = report_of("forkserver")
        assert found["ppid"] != template_pid()
        assert found["exitcode"] == 0
    finally:
        multiprocessing.set_forkserver_preload(before)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def test_custom_context_starts_processes_in_its_own_way() -> None:
    class Own(context.SpawnContext):
        pass

    for given in (Own(), multiprocessing.get_context("fork")):
        assert process_maker(given, (), needs_torch=True) == given.Process


@pytest.mark.parametrize(
    ("sources", "brings_torch"),
    [
        (["tests.worker.template_kit"], False),
        (["shmload.worker.sample_reader", "numpy", "pickle"], False),
        (["shmload"], False),
        (["tests.faults.faults_kit"], True),
        (["tests.worker.test_template"], True),
    ],
)
def test_torch_is_preloaded_if_the_job_needs_it(sources: list[str], brings_torch: bool) -> None:
    process = process_maker(multiprocessing.get_context("spawn"), sources, needs_torch=False)(target=print)
    assert ("torch" in process.modules) == brings_torch


def test_child_of_the_trainer_does_not_use_its_template() -> None:
    report_of("spawn")
    parents = template_pid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = report_of("spawn")
            os.write(writer, f"{found['ppid']} {template_pid()} {found['parent']}".encode())
            template._current = None  # ends the child's own template
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    its, template_of_it, parent = map(int, os.read(reader, 100).split())
    os.close(reader)
    assert its == template_of_it != parents
    assert parent == pid
    assert report_of("spawn")["ppid"] == parents


PROGRAM = """
import os, sys
import numpy as np
from shmload import ShmLoader
from tests.worker.template_kit import private_mib

class Squares:
    def __len__(self): return 64
    def __getitem__(self, i): return np.full(16, i * i)

def main(method):
    all_parents = []
    for seed in (None, None, 1, 1):
        with ShmLoader(Squares(), 4, num_workers=2, seed=seed, shuffle=False, multiprocessing_context=method) as loader:
            found = []
            for step, batch in enumerate(loader):
                found += batch[:, 0].tolist()
                if step == 2:
                    pids = loader._builder.last.pool.pids
                    sizes = [private_mib(pid) for pid in pids]
                    parents = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1] for pid in pids]
            assert found == [i * i for i in range(64)], found
            assert max(sizes) <= MOST_MIB, sizes
            all_parents += parents
    assert len(set(all_parents)) == 1 and int(all_parents[0]) != os.getpid(), all_parents
    print("well")

if __name__ == "__main__":
    main(METHOD)
"""


@METHODS
def test_program_gets_small_workers_of_one_template(method: str, output_of: Callable[..., str]) -> None:
    assert output_of(PROGRAM.replace("METHOD", repr(method)).replace("MOST_MIB", str(MOST_MIB)), strict=False) == "well\n"


HOLDER = """
import os, sys
from shmload.worker.template import template_for
held = template_for("spawn")
held.request(sys.argv[1].split())
if "fork" in sys.argv[2]:
    import multiprocessing
    import tests.worker.template_kit as kit
    from shmload.worker.template import process_maker
    process = process_maker(multiprocessing.get_context("spawn"), (), needs_torch=False)(target=os.getpid)
    process.start()
    process.join()
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
print(held.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["importing", "fork"])
def test_template_ends_with_its_trainer(state: str, tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "torch" if state == "importing" else "os", state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**program_env(), "TMPDIR": str(tmp_path)},
    )
    with trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline()) if state == "fork" else 0
        held = int(trainer.stdout.readline())
        trainer.kill()
        assert await_end(held)
        assert list(tmp_path.iterdir()) == []
        assert not child or psutil.Process(child).status() != psutil.STATUS_ZOMBIE


def test_unneeded_template_leaves_nothing() -> None:
    report_of("spawn")
    before, num_fds = template_pid(), psutil.Process().num_fds()
    for _ in range(3):
        template._current = None
        report_of("spawn")
    assert psutil.Process().num_fds() == num_fds
    assert not psutil.pid_exists(before)


def test_template_prints_nothing_when_its_trainer_ends() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = template._PROGRAM.format(path=sys.path, number=theirs.fileno())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
    ours.send(b"atexit")  # it is running
    ours.close()
    assert process.communicate(timeout=DEADLINE_S) == (None, "")
    assert process.returncode == 0
