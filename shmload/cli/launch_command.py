"""`shmload launch`: a script in one process per GPU.

Exit code 0: all ranks ended with 0; 1: one failed, and the others were ended; 2: the command line is wrong; 128 + n: stopped by
signal n (130: ^C, 143: SIGTERM).
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def launch(
    script: Annotated[str, Argument(metavar="SCRIPT", help="A Python file; with --module a module's name.")],
    args: Annotated[list[str] | None, Argument(metavar="ARGS", help="What follows goes to the script as it is.")] = None,
    nprocs: Annotated[int | None, Option(min=1, help="Processes here.", show_default="one for each CUDA device; else 1")] = None,
    module: Annotated[bool, Option("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False,
    grace: Annotated[float, Option(min=0, help="Seconds from SIGTERM to SIGKILL when ranks are ended.")] = 5.0,
    pin: Annotated[bool, Option(help="Give each rank processors of its own.")] = True,
    logs: Annotated[Path | None, Option(help="Append each rank's output to FOLDER/rank_N.log.", metavar="FOLDER")] = None,
    nnodes: Annotated[int, Option(min=1, help="Machines; run the command on each.")] = 1,
    node_rank: Annotated[int, Option(min=0, help="Which of the machines this is.")] = 0,
    master_addr: Annotated[str | None, Option(help="Name or address of machine 0; needed with several.", metavar="HOST")] = None,
    master_port: Annotated[
        int | None, Option(min=1, max=65535, help="Port of rank 0.", show_default="free; with several machines 29500")
    ] = None,
) -> None:
    """Run a script in one process per GPU, with torch.distributed's environment, as torchrun --standalone does.

    Each rank's lines come out with its rank before them; the first that fails ends all, and its traceback comes last. Options of
    this command stand before SCRIPT.
    """
    import os
    import secrets
    from functools import partial

    from shmload.errors import RankFailed
    from shmload.launch.ranks import LOOPBACK, STATIC_PORT, NodePlace, held_port, number_of_ranks, rank_specs, start_command
    from shmload.launch.supervisor import SpawnedRanks
    from shmload.launch.watching import Stopped
    from shmload.shm.names import Host

    if not module and not os.path.exists(script):
        raise typer.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    if nnodes > 1 and master_addr is None:
        raise typer.BadParameter("with several machines they must know where machine 0 is", param_hint="--master-addr")
    if node_rank >= nnodes:
        raise typer.BadParameter(f"machines are numbered from 0 to {nnodes - 1}; got {node_rank}", param_hint="--node-rank")
    held = held_port() if master_port is None and nnodes == 1 else None
    if master_port is None:
        master_port = STATIC_PORT if held is None else held.getsockname()[1]
    # the same on all machines, and another one in the next run
    run_id = secrets.token_hex(8) if nnodes == 1 else f"{master_addr}:{master_port}"
    place = NodePlace(master_addr or LOOPBACK, master_port, run_id, nnodes, node_rank)
    host = Host()
    command = [sys.executable, *(["-m"] if module else []), script, *(args or [])]
    specs = rank_specs(place, number_of_ranks(nprocs, host), host, pin=pin, logs=logs)
    ranks = SpawnedRanks(partial(start_command, command), specs, grace, held)
    try:
        ranks.run()
    except RankFailed as failure:
        typer.echo(f"shmload launch: {failure}", err=True)
        raise typer.Exit(1) from None
    except Stopped as stopped:
        typer.echo(f"shmload launch: {stopped}", err=True)
        raise typer.Exit(128 + stopped.number) from None
