"""Compute a key that is the same in all processes of one run on one node, and different in every other run there."""

from __future__ import annotations

import os

from shmload.processes.identity import start_of

_RUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")


def run_key() -> tuple[str, ...]:
    """Return the key of this run, the same in every process of the run on this node.

    Launchers set the same variables in every rank (MASTER_ADDR and MASTER_PORT, torchrun's run id, Slurm's job and step, PMIx's
    namespace), and the key consists of them. Without a launcher, ranks are children of one process (torch.multiprocessing.spawn,
    MPICH's mpirun), so the key is that process's id and start time. The PID namespace is always part of the key, because ids mean
    nothing across containers.
    """
    namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    found = tuple(os.environ.get(name, "") for name in _RUN_VARIABLES)
    if any(found):
        return (namespace, *found)
    parent = os.getppid()
    return namespace, str(parent), start_of(parent)  # "" for parent 0, which is in another PID namespace
