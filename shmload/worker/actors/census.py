"""How many actors `num_workers="auto"` means: as many as the cluster's other nodes have CPUs.

A process of its own asks the cluster, because the trainer imports no running Ray. This machine's own CPUs count only where there is
no other node: they are the trainer's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from shmload.errors import ClusterUnreachable
from shmload.worker.actors.cluster import join
from shmload.worker.actors.placement import Node, alive_nodes


def num_actors(address: str) -> int:
    """Asks the cluster.

    Raises:
        ClusterUnreachable: there is none.
    Cost: seconds, as it starts Ray.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "shmload.worker.actors.census", address]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        number, error = json.loads(done.stdout.rpartition("\n")[2])
    except ValueError:
        raise ClusterUnreachable(f"the Ray cluster at address={address!r} could not be asked for its CPUs") from None
    if error:
        raise ClusterUnreachable(error)
    return int(number)


def cpus_elsewhere(nodes: list[Node], here: str) -> int:
    """CPUs of the nodes but this one; this one's where there is no other. At least 1."""
    others = sum(node.num_cpus for node in nodes if node.node_id != here)
    return others or max(1, sum(node.num_cpus for node in nodes))


def main(address: str) -> None:
    try:
        join(address)
        import ray

        number, error = cpus_elsewhere(alive_nodes(ray.nodes()), ray.get_runtime_context().get_node_id()), ""
    except ClusterUnreachable as failure:
        number, error = 0, str(failure)
    sys.stdout.write("\n" + json.dumps([number, error]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
