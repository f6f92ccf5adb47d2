"""A Ray cluster on this machine for `benchmarks.cluster`: prints its address, and ends with its standard input.

python -m benchmarks.cluster_host 4        one node of 4 CPUs, beside the trainer
python -m benchmarks.cluster_host 0 4      the trainer's node has none: whatever is decoded comes from the other node
"""

import sys

from ray.cluster_utils import Cluster

STORE_NBYTES = 1 << 30


def main(nums_cpus: list[int]) -> None:
    node = {"object_store_memory": STORE_NBYTES}
    head = {**node, "num_cpus": nums_cpus[0], "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for num_cpus in nums_cpus[1:]:
        cluster.add_node(num_cpus=num_cpus, **node)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
