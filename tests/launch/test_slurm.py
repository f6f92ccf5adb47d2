"""A real Slurm with four nodes on this machine: tasks of srun are ranks, and the batch script of docs/launch.md works."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil
import pytest

from tests.free_ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow(reason="starts Slurm's daemons"),
    pytest.mark.skipif(bool(missing), reason=f"needs Slurm's {', '.join(missing)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to run Slurm's nodes"),
]
ROOT = Path(__file__).parents[2]
NUM_NODES, NUM_SAMPLES = 4, 24
PROGRAM = f"""
from shmload import ShmLoader
with ShmLoader(list(range({NUM_SAMPLES})), 2, seed=3, shuffle=True, num_workers=1) as loader:
    print("had", *(int(index) for batch in loader for index in batch), flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Returns the environment for commands of a running cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    ours = f"{os.environ['PATH']}:/usr/sbin"
    environ = {**os.environ, "PATH": ours, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    host, control = socket.gethostname().partition(".")[0], free_port(NUM_NODES + 1)
    nodes = range(control + 1, control + 1 + NUM_NODES)
    (folder / "key").write_bytes(os.urandom(1024))
    os.chmod(folder / "key", 0o400)
    names = [f"n{number}" for number in range(1, NUM_NODES + 1)]
    for name in ("state", *names):
        (folder / name).mkdir()
    config = f"""\
        ClusterName=test
        SlurmctldHost={host}(127.0.0.1)
        SlurmctldPort={control}
        SlurmUser=root
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge.socket
        CredType=cred/munge
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/affinity
        SelectType=select/cons_tres
        ReturnToService=2
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/%n.pid
        """
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
        for name, port in zip(names, nodes, strict=True)
    ]
    (folder / "slurm.conf").write_text(
        "\n".join([textwrap.dedent(config), *lines, "PartitionName=all Nodes=ALL Default=YES State=UP", ""])
    )
    places = {name: f"{folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
    keeping = [f"--{name}{'' if name == 'socket' else '-file'}={place}" for name, place in places.items()]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/key", *keeping],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in names),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(command, env=environ, **quiet) for command in daemons]
    try:
        subprocess.run(
            ["srun", "--immediate=60", f"--nodes={NUM_NODES}", "true"], env=environ, check=True, timeout=90, capture_output=True
        )
        yield environ
    finally:
        running = [psutil.Process(daemon.pid) for daemon in started]
        for process in [*running, *(child for each in running for child in each.children(recursive=True))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in started:
            daemon.wait()


def batches_read(output: str) -> list[list[int]]:
    """Returns what each rank has read, from the output of all."""
    return [[int(index) for index in found.split()] for found in re.findall(r"had ([\d ]+)", output)]


def test_tasks_of_srun_share_a_dataset(slurm: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = ["srun", f"--nodes={NUM_NODES}", "--ntasks-per-node=2", "--cpus-per-task=1", sys.executable, str(program)]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120, check=True)
    ranks = batches_read(done.stdout)
    assert [len(rank) for rank in ranks] == [NUM_SAMPLES // 8] * 8
    assert sorted(chain.from_iterable(ranks)) == list(range(NUM_SAMPLES))


def test_documented_batch_script_runs(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / "launch.md").read_text(), re.DOTALL)
    for page, here in (
        ("--cpus-per-task=64 --gpus-per-node=8", f"--cpus-per-task=2 --output={tmp_path}/out"),
        ("srun shmload", f"srun {Path(sys.executable).parent}/shmload"),
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        ('"$first:29400"', f'"localhost:{free_port()}"'),  # the nodes have no names of their own here
    ):
        assert page in script
        script = script.replace(page, here)
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(["sbatch", "--wait", "job.sh"], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=180)
    output = (tmp_path / "out").read_text()
    assert done.returncode == 0, done.stderr + output
    ranks = batches_read(output)
    assert len(ranks) == 2 * NUM_NODES
    assert sorted(chain.from_iterable(ranks)) == list(range(NUM_SAMPLES))
