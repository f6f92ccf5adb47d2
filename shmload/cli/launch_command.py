"""`shmload launch`: run a script in one process per GPU.

Exit code 0: all ranks ended with 0; 1: a rank failed, and the others were ended, or machines did not find each other; 2: the
command line is wrong; 128 + n: stopped by signal n (130: ^C, 143: SIGTERM).
"""

import logging
import os
import re
import secrets
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from shmload.cli.terminal import Unwritable


def launch(
    script: Annotated[str, Argument(metavar="SCRIPT", help="A Python file; with --module, a module name.")],
    args: Annotated[list[str] | None, Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    nprocs: Annotated[
        str | None,
        Option(
            "--nprocs",
            "--nproc-per-node",
            help="Number of processes, or gpu, cpu or auto.",
            show_default="one per CUDA device, else 1",
        ),
    ] = None,
    module: Annotated[bool, Option("--module", "-m", help="Run SCRIPT as a module, like python -m.")] = False,
    no_python: Annotated[bool, Option("--no-python", help="Run SCRIPT directly instead of with Python.")] = False,
    grace: Annotated[float, Option(min=0, help="Seconds between SIGTERM and SIGKILL when ranks are stopped.")] = 5.0,
    pin: Annotated[bool, Option(help="Pin each rank to its own processors.")] = True,
    logs: Annotated[Path | None, Option(help="Append each rank's output to FOLDER/rank_N.log.", metavar="FOLDER")] = None,
    nnodes: Annotated[
        str | None,
        Option(help="Number of machines; run the command on each. MIN:MAX: machines may join and leave.", show_default="1"),
    ] = None,
    node_rank: Annotated[int | None, Option(min=0, help="Number of this machine.", show_default="0")] = None,
    master_addr: Annotated[
        str | None, Option(help="Name or address of machine 0; required with several machines.", metavar="HOST")
    ] = None,
    master_port: Annotated[
        int | None, Option(min=1, max=65535, help="Port of rank 0.", show_default="a free one; 29500 with several machines")
    ] = None,
    standalone: Annotated[bool, Option("--standalone", help="Use one machine and a free port.")] = False,
    max_restarts: Annotated[
        int | None, Option(min=0, help="How often to restart all ranks after one has failed.", show_default="0")
    ] = None,
    rdzv_backend: Annotated[
        str | None, Option(help="Rendezvous backend.", show_default="c10d if machines may join and leave")
    ] = None,
    rdzv_endpoint: Annotated[str | None, Option(help="Rendezvous address.", metavar="HOST:PORT")] = None,
    rdzv_id: Annotated[str | None, Option(help="Name of the run at the rendezvous.", hidden=True)] = None,
    rdzv_conf: Annotated[
        str | None, Option(help="Further rendezvous settings, such as last_call_timeout=5.", metavar="KEY=VALUE,...", hidden=True)
    ] = None,
    local_addr: Annotated[str | None, Option(help="Address of this machine.", metavar="HOST", hidden=True)] = None,
    role: Annotated[str | None, Option(help="Role of the ranks.", hidden=True)] = None,
    monitor_interval: Annotated[
        float | None, Option(help="Seconds between checks for machines that want to join.", hidden=True)
    ] = None,
    log_dir: Annotated[
        str | None, Option(help="Folder for the files of --redirects and --tee.", metavar="FOLDER", hidden=True)
    ] = None,
    redirects: Annotated[
        str | None, Option("--redirects", "-r", help="Write output to files: 1 stdout, 2 stderr, 3 both.", hidden=True)
    ] = None,
    tee: Annotated[
        str | None, Option("--tee", "-t", help="Write output to files and print it here: 1 stdout, 2 stderr, 3 both.", hidden=True)
    ] = None,
    local_ranks_filter: Annotated[
        str | None, Option(help="Local ranks whose output is printed here.", metavar="0,1,...", hidden=True)
    ] = None,
) -> None:
    """Run a script in one process per GPU, with torch.distributed's environment.

    Each output line begins with its rank. The first rank to fail ends all; its traceback comes last. Options, also torchrun's
    others (--tee, --rdzv-conf, ...), come before SCRIPT: docs/launch.md.
    """
    from shmload.errors import RankFailed
    from shmload.launch.signals import Stopped

    if module and no_python:
        raise typer.BadParameter("modules are run by Python", param_hint="--no-python")
    if not module and not no_python and not os.path.exists(script):
        raise typer.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    if no_python and shutil.which(script) is None:
        raise typer.BadParameter(f"there is no program {script!r} in PATH; in this folder it is ./{script}", param_hint="SCRIPT")
    if nprocs is not None and not re.fullmatch(r"[1-9]\d*|[a-z]+", nprocs):
        raise typer.BadParameter(f"a number from 1 up, or gpu, cpu, auto; got {nprocs!r}", param_hint="--nprocs")
    # options given take precedence over the environment's (PET_NNODES, ...), even if they equal the default
    explicit: dict[str, object] = {"nnodes": nnodes, "node-rank": node_rank, "max-restarts": max_restarts}
    nnodes, node_rank, max_restarts = nnodes or "1", node_rank or 0, max_restarts or 0
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nnodes):
        raise typer.BadParameter(f"a number of machines from 1 up, or MIN:MAX; got {nnodes!r}", param_hint="--nnodes")
    if rdzv_endpoint is None:
        nnodes = re.sub(r"^(\d+):\1$", r"\1", nnodes)  # the number of machines is fixed
    if standalone and nnodes != "1":
        raise typer.BadParameter(f"that is one machine; got --nnodes {nnodes}", param_hint="--standalone")
    if ":" in nnodes and rdzv_backend == "static":
        raise typer.BadParameter(f"static is for a fixed number of machines; got --nnodes {nnodes}", param_hint="--rdzv-backend")
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{logs}: {error.strerror}", param_hint="--logs") from None
    is_dynamic = ":" in nnodes and rdzv_backend is None
    if is_dynamic and rdzv_endpoint is None:
        raise typer.BadParameter("machines that come and go must know where they meet", param_hint="--rdzv-endpoint")
    torchs = {  # options that only torch's launcher implements
        "rdzv-backend": "c10d" if is_dynamic else rdzv_backend,
        "rdzv-endpoint": rdzv_endpoint,
        "rdzv-id": rdzv_id,
        "rdzv-conf": rdzv_conf,
        "local-addr": local_addr,
        "role": role,
        "monitor-interval": monitor_interval,
        "log-dir": log_dir,
        "redirects": redirects,
        "tee": tee,
        "local-ranks-filter": local_ranks_filter,
    }
    by_environment = any(name.startswith("PET_") for name in os.environ)  # torchrun's options, as operators of clusters set them
    is_static = rdzv_backend in (None, "static") and rdzv_endpoint is None and not by_environment
    if is_static and nnodes != "1" and master_addr is None:
        raise typer.BadParameter("with several machines they must know where machine 0 is", param_hint="--master-addr")
    if is_static and node_rank >= int(nnodes):
        raise typer.BadParameter(f"machines are numbered from 0 to {int(nnodes) - 1}; got {node_rank}", param_hint="--node-rank")
    if is_static and nnodes != "1" and max_restarts:
        _tell(
            "ranks that start again on several machines may not find each other by --master-addr alone, as with torchrun; "
            "give each machine --rdzv-backend c10d --rdzv-endpoint HOST:PORT instead"
        )
    words = [script, *(args or [])]
    try:
        is_torchs = any(value is not None for value in torchs.values()) or (max_restarts and nnodes != "1")
        if by_environment or is_torchs or not (nprocs or "1").isdecimal():
            given: dict[str, object] = {
                **explicit,
                "nproc-per-node": nprocs,
                "master-addr": master_addr,
                "master-port": master_port,
                **torchs,
            }
            flags = {"--module": module, "--no-python": no_python, "--standalone": standalone}
            lost = _run_by_torch(given, [*(flag for flag, is_set in flags.items() if is_set), *words], grace, pin, logs)
        else:
            command = words if no_python else [sys.executable, *(["-m"] if module else []), *words]
            number = int(nprocs) if nprocs else None
            lost = _run(command, number, grace, pin, logs, int(nnodes), node_rank, master_addr, master_port, max_restarts)
    except (RankFailed, ConnectionError) as failure:
        _tell(str(failure))
        raise typer.Exit(1) from None
    except Stopped as stopped:
        _tell(str(stopped))
        raise typer.Exit(128 + stopped.number) from None
    if lost is not None:
        raise Unwritable(lost.errno, lost.strerror)


def _run(
    command: list[str],
    nprocs: int | None,
    grace_s: float,
    pin: bool,
    logs: Path | None,
    num_nodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
) -> OSError | None:
    from shmload.errors import RankFailed
    from shmload.launch import environment, rank_specs
    from shmload.launch.spawned_ranks import SpawnedRanks
    from shmload.shm.host import Host

    # the same on all machines, and different in the next run
    run_id = secrets.token_hex(8) if num_nodes == 1 else f"{master_addr}:{master_port or environment.STATIC_PORT}"
    host = Host()
    num_ranks = rank_specs.number_of_ranks(nprocs, host)
    lost: OSError | None = None
    for num_restarts in range(max_restarts + 1):
        held = environment.held_port() if master_port is None and num_nodes == 1 else None
        port = master_port or (environment.STATIC_PORT if held is None else held.getsockname()[1])
        place = environment.NodePlace(
            master_addr or environment.LOOPBACK, port, run_id, num_nodes, node_rank, num_restarts, max_restarts
        )
        specs = rank_specs.rank_specs(place, num_ranks, host, pin=pin, logs=logs)
        started = SpawnedRanks(partial(rank_specs.start_command, command), specs, grace_s, held)
        try:
            started.run()
            return lost or started.lost
        except RankFailed as failure:
            lost = lost or started.lost
            if num_restarts == max_restarts:
                raise
            said = environment.next_start(num_restarts + 2, range(num_ranks), num_ranks, num_restarts + 1, max_restarts)
            _tell(f"{failure}\n\n{said}")
    return None


def _tell(text: str) -> None:
    typer.echo(f"shmload launch: {text}", err=True)


def _run_by_torch(given: dict[str, object], words: list[str], grace_s: float, pin: bool, logs: Path | None) -> OSError | None:
    from shmload.launch.elastic_agent import run_elastic
    from shmload.launch.rank_specs import number_of_ranks
    from shmload.shm.host import Host

    if given["nproc-per-node"] is None and "PET_NPROC_PER_NODE" not in os.environ:
        given["nproc-per-node"] = number_of_ranks(None, Host())
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # the agent would log failures that are reported here
    arguments = [f"--{name}={value}" for name, value in given.items() if value is not None]
    try:
        return run_elastic([*arguments, *words], grace_s=grace_s, pin=pin, logs=str(logs.absolute()) if logs else "", tell=_tell)
    except ValueError as error:  # torch has refused an option's value
        raise typer.BadParameter(str(error)) from None
