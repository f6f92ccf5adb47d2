"""Start one process per GPU: `shmload.spawn` for functions, `shmload launch` for scripts.

The launcher (spawned_ranks.py) starts the ranks of one node (fork_start.py, spawn_start.py), gives each rank torch.distributed's
environment (environment.py) and its own processors (rank_specs.py, affinity.py), prints their output (output.py), and watches them
(watching.py): when one rank fails, all are ended (rank_failure.py describes why). The launcher does not decode samples or own a
ring, and imports torch only to count CUDA devices, if there is a driver and no number of ranks is given (topology.py); ranks are
ordinary trainers. For restarts, machines that join and leave, and torch's log options, torch.distributed.elastic's agent starts the
ranks (elastic_agent.py); they are watched, printed and ended in the same way.

Each rank begins with a short program (boot.py), which asks the kernel to kill the process when the launcher's thread ends, and then
becomes the user's program by exec. So a rank dies with its launcher from its first moment, and its `__main__` is the same as
without a launcher. Rejected alternatives: a watching thread in the rank, because a user's script does not start one; runpy, because
its `__main__` differs; a rendezvous server in the launcher, because it would have to import torch first.
"""
