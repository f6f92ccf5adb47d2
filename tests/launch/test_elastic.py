"""`shmload launch` on torch's agent: restarts, machines that leave and join, torchrun's options, and shmload's own features."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import typer

from shmload.cli import app
from shmload.cli.terminal import Unwritable
from shmload.errors import RankFailed
from shmload.launch.environment import threads_of_each
from shmload.launch.rank_specs import RankSpec
from shmload.tools.audit.verify import read_folder, verify
from tests.free_ports import free_port
from tests.launch import elastic_program
from tests.launch.launch_kit import UP_S, Run, all_end, assert_signal_ends_ranks, wait_for_ranks

slow = pytest.mark.slow(reason="torch's agent imports torch before it starts a script")
LAUNCH = ("-m", "shmload", "launch")
TORCH_ONLY = ["--role", "trainer"]  # an option that only torch's agent supports
STAY = """
import os
from tests.launch import rank_functions
getattr(rank_functions, os.environ.get("HOW", "stay"))(int(os.environ["LOCAL_RANK"]), ".")
"""
FAILING = """
import os, signal, sys
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]):
    if os.environ["RANK"] == "1":
        print("now", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
print(os.environ["WORLD_SIZE"], sorted(os.sched_getaffinity(0)), os.environ["SHMLOAD_RANK_CPUS"], sys.argv[2:], sys.stdin.read())
"""
KILLED = (
    r"shmload launch: rank 1 \(pid \d+\) was killed by SIGKILL, the first of 2 to fail\. If no one killed it, .*\n\n"
    r"The end of its stderr:\n(?:now\n)+\nrank 0 ended when asked to \(SIGTERM\)\n"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets the folder for temporary files of the launcher and its ranks."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@slow
@pytest.mark.parametrize("options", [[], TORCH_ONLY])
def test_killed_rank_is_reported_and_all_are_restarted(options: list[str], started: Run, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    words = ["1", "$HOME", "$$", "--max_restarts", "a b"]
    process = started(*LAUNCH, "--nproc_per_node", "2", "--max_restarts", "1", *options, "script.py", *words)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0
    message = r"\nstart 2: ranks 0 to 1 of 2; 1 of 1 restarts are used up\n"
    assert re.fullmatch(r"\[rank 1\] now\n" + KILLED + message, err), err
    lines = [re.fullmatch(r"\[rank (\d)\] 2 (\[.*\]) (\d+) (\[.*\]) ", line) for line in sorted(out.splitlines())]
    found = [line.groups() for line in lines if line]
    assert [(rank, ast.literal_eval(given)) for rank, _, _, given in found] == [("0", words[1:]), ("1", words[1:])]
    cpus = [ast.literal_eval(mine) for _, mine, _, _ in found]
    assert [str(len(mine)) for mine in cpus] == [number for _, _, number, _ in found]
    if len(os.sched_getaffinity(0)) > 1:
        assert not {*cpus[0]} & {*cpus[1]}
    assert list(temporary.iterdir()) == []


@slow
@pytest.mark.parametrize("options", [[], TORCH_ONLY])
def test_first_failure_is_reported_last_without_restarts_left(options: list[str], started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    process = started(*LAUNCH, "--nprocs", "2", "--max-restarts", "1", *options, "--logs", "logs", "script.py", "9")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(KILLED + r"\nstart 2: .*\n" + KILLED, err), err
    assert (tmp_path / "logs/rank_1.log").read_text() == "now\n" * 2, "each start appends"


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_in_order_with_one_line(number: signal.Signals, started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STAY)
    process = started(*LAUNCH, "--nprocs", "2", "--max-restarts", "3", *TORCH_ONLY, "script.py")
    assert_signal_ends_ranks(process, wait_for_ranks(tmp_path, 2, process), number)


@slow
def test_rank_that_does_not_end_is_killed_after_the_grace_period(
    started: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "ignore")
    (tmp_path / "script.py").write_text(STAY)
    process = started(*LAUNCH, "--nprocs", "1", "--max-restarts", "3", *TORCH_ONLY, "--grace", "0.1", "script.py")
    pids = wait_for_ranks(tmp_path, 1, process)
    process.terminate()
    message = "rank 0 did not end within 0.1 s of SIGTERM and had to be killed (SIGKILL)"
    assert process.communicate(timeout=120) == ("", f"shmload launch: stopped by SIGTERM; {message}\n")
    assert all_end(pids, 0)


@slow
def test_no_rank_outlives_an_agent_that_is_killed(started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STAY)
    process = started(*LAUNCH, "--nprocs", "2", "--max-restarts", "3", *TORCH_ONLY, "script.py")
    pids = wait_for_ranks(tmp_path, 2, process)
    process.kill()
    assert all_end(pids)


def test_one_machine_restarts_its_ranks_without_torchs_agent(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    places: list[list[str]] = []

    class Failing:
        lost = None

        def __init__(self, start: Any, specs: list[RankSpec], grace_s: float, port: socket.socket) -> None:
            counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
            places.append([specs[0].environ[name] for name in counts])
            port.close()

        def run(self) -> None:
            raise RankFailed(f"failure {len(places)}")

    monkeypatch.setattr("shmload.launch.spawned_ranks.SpawnedRanks", Failing)
    with pytest.raises(SystemExit) as ended:
        app(["launch", "--nprocs", "2", "--max-restarts", "2", __file__])
    assert ended.value.code == 1
    assert [place[:2] for place in places] == [["0", "2"], ["1", "2"], ["2", "2"]]
    assert len({place[2] for place in places}) == 1, "all starts belong to one run"
    message = [
        f"failure {number}\n\nstart {number + 1}: ranks 0 to 1 of 2; {number} of 2 restarts are used up" for number in (1, 2)
    ]
    assert capsys.readouterr().err == "".join(f"shmload launch: {text}\n" for text in [*message, "failure 3"])


def test_output_lost_by_an_earlier_start_is_reported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    class FailsOnce:
        def __init__(self, start: Any, specs: list[RankSpec], grace_s: float, port: socket.socket) -> None:
            starts.append(len(starts))
            self.lost = None if len(starts) > 1 else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            port.close()

        def run(self) -> None:
            if len(starts) == 1:
                raise RankFailed("once")

    monkeypatch.setattr("shmload.launch.spawned_ranks.SpawnedRanks", FailsOnce)
    with pytest.raises(Unwritable, match="No space left"):  # which ends the command with 74
        app(["launch", "--nprocs", "2", "--max-restarts", "2", __file__])
    assert starts == [0, 1]


@pytest.mark.parametrize(("options", "is_warned"), [([], True), (["--rdzv-backend", "c10d", "--rdzv-endpoint", "here:1"], False)])
def test_restarts_on_several_machines_warn_about_what_they_need(
    options: list[str], is_warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shmload.launch.elastic_agent.run_elastic", lambda arguments, **_: None)
    monkeypatch.setenv("LOGLEVEL", "ERROR")  # otherwise the command silences all logging
    with pytest.raises(SystemExit) as ended:
        app(["launch", "--nnodes", "2", "--max-restarts", "1", "--master-addr", "here", *options, __file__])
    assert not ended.value.code
    assert ("--rdzv-backend c10d" in capsys.readouterr().err) == is_warned


@pytest.mark.parametrize(
    ("given", "has_own_cpus", "wanted"),
    [(None, True, None), (None, False, threads_of_each(2)), ("3", True, "3"), ("3", False, "3")],
)
def test_ranks_of_torchs_agent_get_the_same_environment(
    given: str | None, has_own_cpus: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmload.launch.elastic_agent import _set_environment  # imports torch's agent

    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "1")  # torch's default if nothing is set
    monkeypatch.setenv("SHMLOAD_RANK_CPUS", "7")
    _set_environment(given, 2, has_own_cpus=has_own_cpus)
    found = {
        name: os.environ.pop(name) for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    }
    assert set(found.values()) == {"1"}
    assert (os.environ.get("OMP_NUM_THREADS"), os.environ.get("SHMLOAD_RANK_CPUS")) == (wanted, None)


WRITE_LINES = "from tests.launch.rank_functions import write_lines\nimport os\nwrite_lines(os.environ['RANK'])\n"


@slow
def test_torchs_log_files_and_filter_keep_the_rank_prefix(started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRITE_LINES)
    options = ["--redirects", "2", "--tee", "0:1", "--log-dir", "logs", "--local-ranks-filter", "0", "--rdzv-id", "run"]
    process = started(*LAUNCH, "--nprocs", "2", *options, "script.py")
    assert process.communicate(timeout=90) == ("[rank 0] out 0\n", "")
    files = {str(path)[-12:]: path.read_text() for path in (tmp_path / "logs").rglob("std*.log")}
    assert files == {"0/stdout.log": "out 0\n", "0/stderr.log": "err 0", "1/stderr.log": "err 1"}


def test_command_line_overrides_an_operators_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given value also overrides the environment when it equals the default."""
    given: list[str] = []
    monkeypatch.setattr("shmload.launch.elastic_agent.run_elastic", lambda arguments, **_: given.extend(arguments))
    monkeypatch.setenv("LOGLEVEL", "ERROR")  # otherwise the command silences all logging
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    options = ["--nprocs=1", "--nnodes=1", "--node-rank=0", "--max-restarts=0"]
    with pytest.raises(SystemExit) as ended:
        app(["launch", *options, __file__])
    assert not ended.value.code
    assert set(given) == {"--nproc-per-node=1", *options[1:], __file__}


def test_fixed_number_of_machines_can_be_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("shmload.cli.launch_command._run", lambda *arguments: started.append(arguments[5]))
    with pytest.raises(SystemExit) as ended:
        app(["launch", "--nnodes", "1:1", __file__])
    assert not ended.value.code
    assert started == [1]


@slow
def test_operator_environment_works_as_with_torchrun(started: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow's operator sets such an environment."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    (tmp_path / "script.py").write_text(WRITE_LINES)
    out, err = started(*LAUNCH, "script.py").communicate(timeout=90)
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


@slow
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--redirects", "9"], 2, "9 does not match"),
        (["--rdzv-conf", "key"], 2, "option 'key' must have a value"),
        (["--nnodes", "4:1", "--rdzv-endpoint", "127.0.0.1:1"], 2, "min_nodes must be > 0 and <= max_nodes"),
        (["--nproc-per-node", "many"], 2, "Unsupported nproc_per_node value: many"),
        (
            ["--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", "is_host=0,read_timeout=1"],
            1,
            "shmload launch: the machines of this run have not found each other: RendezvousConnectionError",
        ),
    ],
)
def test_refusals_of_torch_are_one_line(options: list[str], code: int, words: str, started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRITE_LINES)
    process = started(*LAUNCH, *options, "script.py")
    _, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert words in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "1:4"], "machines that come and go must know where they meet"),
        (["--nnodes", "1:2", "--rdzv-backend", "static", "--master-addr", "a"], "static is for a fixed number of machines"),
        (["--standalone", "--nnodes", "2", "--master-addr", "a"], "that is one machine; got --nnodes 2"),
        (["--nnodes", "some"], "a number of machines from 1 up, or MIN:MAX; got 'some'"),
        (["--nnodes", "2"], "with several machines they must know where machine 0 is"),
        (["--nprocs", "0"], "a number from 1 up, or gpu, cpu, auto; got '0'"),
        (["--module", "--no-python"], "modules are run by Python"),
    ],
)
def test_wrong_command_line_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["launch", *options, __file__])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_torchruns_option_names_are_accepted() -> None:
    """Options can be written with - or _."""
    command: Any = typer.main.get_command(app)
    given = {
        "nproc-per-node": "2",
        "nnodes": "1:4",
        "max-restarts": "3",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "there:1",
        "rdzv-id": "run",
        "rdzv-conf": "a=b",
        "log-dir": "logs",
        "local-addr": "here",
        "node-rank": "1",
        "master-addr": "there",
        "master-port": "5",
        "redirects": "3",
        "tee": "3",
        "role": "trainer",
        "monitor-interval": "5.0",
        "local-ranks-filter": "0",
    }
    for mark in "-_":
        words = [f"--{name.replace('-', mark)}={value}" for name, value in given.items()]
        words += ["--standalone", f"--no{mark}python", "-r", "1", "-t", "2", "script.py", "--node_rank"]
        parameters = command.commands["launch"].make_context("launch", words).params
        found = {name.replace("_", "-"): str(value) for name, value in parameters.items()}
        assert found.items() >= {**given, "redirects": "1", "tee": "2"}.items() - {("nproc-per-node", "2")}
        assert (found["nprocs"], found["standalone"], found["no-python"]) == ("2", "True", "True")
        assert parameters["args"] == ["--node_rank"]


SHARING = """
import os, signal
import torch
from shmload import ShmLoader

loader = ShmLoader(torch.arange(24), 4, seed=3, shuffle=True, num_workers=1, rank=0, world_size=1, share="node")
for number, batch in enumerate(loader):
    if number == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    print(batch.tolist(), flush=True)
"""


@slow
@pytest.mark.parametrize("options", [[], TORCH_ONLY])
def test_ranks_share_a_ring_again_after_a_restart(options: list[str], started: Run, tmp_path: Path) -> None:
    """The leader of the first start is killed."""
    (tmp_path / "script.py").write_text(SHARING)
    process = started(*LAUNCH, "--nprocs", "2", "--max-restarts", "1", *options, "script.py")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    both = [[line[9:] for line in out.splitlines() if line.startswith(f"[rank {rank}] ")] for rank in range(2)]
    assert both[0][-6:] == both[1][-6:]
    assert sorted(number for line in both[1][-6:] for number in ast.literal_eval(line)) == list(range(24))


def machine(started: Run, folder: Path, port: int, number: int) -> subprocess.Popen[str]:
    """Starts a launcher that represents a machine with one rank."""
    conf = f"is_host={int(number == 0)},last_call_timeout=3,keep_alive_interval=1"
    options = ["--nnodes", "1:4", "--max-restarts", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf, "--no-pin"]
    program = Path(elastic_program.__file__)
    return started(*LAUNCH, "--nprocs", "1", *options, "--local-addr", "127.0.0.1", "--rdzv-id", "run", program, folder)


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    deadline, pause = monotonic() + 2 * UP_S, threading.Event()
    while not path.exists():
        assert [process.communicate() for process in processes if process.poll() not in (None, -signal.SIGKILL)] == []
        assert monotonic() < deadline, f"{path.name} does not exist"
        pause.wait(0.05)


@pytest.mark.slow(reason="four launchers and their ranks, which import torch, are started and started again twice")
@pytest.mark.timeout(300)
def test_every_sample_is_delivered_once_when_machines_leave_and_join(
    started: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, then three, then four: each start continues from rank 0's state, and the audit proves the whole run."""
    port = free_port()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machines = [machine(started, tmp_path, port, number) for number in range(3)]
    monkeypatch.setenv("LOST", "1")
    lost = machine(started, tmp_path, port, 3)
    monkeypatch.delenv("LOST")
    for rank in range(3):
        wait_for(tmp_path / f"waits {rank}", machines)
    assert lost.wait(60) == -signal.SIGKILL
    machines.append(machine(started, tmp_path, port, 4))
    for each in machines:
        _, err = each.communicate(timeout=90)
        assert each.returncode == 0, err
    starts = {path.name for path in tmp_path.glob("world *")}
    assert {f"world 3 from {elastic_program.LOSE}", f"world 4 from {elastic_program.WAIT}"} <= starts
    report, _ = verify(read_folder(tmp_path / "audit"))
    assert report.verdict == "proven: every sample exactly once"
    epochs = report.loaders[0].epochs
    assert [epoch.epoch for epoch in epochs] == list(range(elastic_program.NUM_EPOCHS))
    assert all(epoch.num_superseded for epoch in epochs), "batches were delivered and rolled back in both epochs"
