"""Start one process per GPU: `shmload.spawn` for functions, `shmload launch` for scripts.

The launcher starts the ranks of one node, gives each torch.distributed's environment and processors of its own (rank_specs.py),
prints what they print, and watches them (watching.py): the first rank to fail ends all. It imports no torch, decodes nothing and
holds no ring; ranks are ordinary trainers. For restarts, machines that join and leave, and log files, torch.distributed.elastic's
agent starts the ranks (elastic_agent.py); they are watched, printed and ended in the same way.

Each rank begins as a few lines of our own (boot.py), which ask the kernel to kill the process when the launcher's thread ends, and
then become the program itself. So a rank dies with its launcher from its first moment, and its `__main__` is the same as without a
launcher. Rejected: a watching thread in the rank, because a script has no line of ours that could start it; runpy, because its
`__main__` differs; a rendezvous server in the launcher, because it would have to import torch first.
"""
