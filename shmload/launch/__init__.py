"""One process per GPU: `shmload.spawn` for functions, `shmload launch` for scripts.

The launcher starts the ranks of one node, says to each by torch.distributed's environment which it is and gives each
its own processors (rank_specs.py), prints what they print and sees to their end (watching.py): the first that fails ends all. It
imports no torch, decodes nothing and holds no ring; ranks are ordinary trainers. Restarts, machines that come and go and files of
logs are torch.distributed.elastic's: its agent starts the ranks then, and they are watched, heard and ended as all others
(elastic_agent.py).

Each rank begins as a few lines of its own (boot.py), which ask the kernel to kill it when the launcher's thread ends and then
become the program itself. So a rank dies with its launcher from its first moment, whatever it does, and its `__main__` is what it
would be without a launcher. Rejected: a watching thread in the rank, since a script has no line of ours to start it in; runpy,
whose `__main__` is another; a rendezvous server in the launcher, which would have to import torch first.
"""
