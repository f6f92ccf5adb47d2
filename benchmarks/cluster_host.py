"""Run a Ray cluster on this machine for `benchmarks.cluster`. It prints its address, and stops when its standard input is closed.

python -m benchmarks.cluster_host 4        one node with 4 CPUs, on which the trainer runs, too
python -m benchmarks.cluster_host 0 4      the trainer's node has no CPUs, so everything is decoded on the other node
"""

import os
import shutil
import sys
import tempfile

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

STORE_NBYTES = 3 << 30  # benchmarks.cluster ships 1 GB, and the data of the previous run may still be stored
SHIPPED_NBYTES = 1 << 30


def touch_object_store() -> int:
    """Makes the node's object store allocate the pages for the shipped data. Otherwise the first case would pay for this."""
    return len(ray.get(ray.put(np.zeros(SHIPPED_NBYTES, np.uint8))))


def main(nums_cpus: list[int]) -> None:
    node = {"object_store_memory": STORE_NBYTES}
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a short path, because sockets are created there
    os.environ["RAY_TMPDIR"] = folder  # Ray writes the address of the newest cluster there, regardless of temp_dir
    os.mkdir(f"{folder}/ray")
    head = {**node, "num_cpus": nums_cpus[0], "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for num_cpus in nums_cpus[1:]:
        cluster.add_node(num_cpus=num_cpus, **node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    for node in ray.nodes():  # a node known to GCS may not accept work yet
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ray.get(ray.remote(touch_object_store).options(num_cpus=0, scheduling_strategy=there).remote())
    print(cluster.address, flush=True)
    sys.stdin.read()
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
