"""Runs a Ray cluster whose head has no CPU and whose autoscaler starts nodes on this machine. Tests drive it as they drive
`ray_host.py`.

    python autoscaling_host.py SOCKET FOLDER

Ray's own `AutoscalingCluster` is not used: it first ends every Ray on the machine (`ray stop --force`), and it needs port 6379.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import ray
from ray._private.services import get_node_ip_address
from ray._private.state import actors

STORE_NBYTES = 80 << 20
HEAD = "ray.head.default"  # as Ray's fake provider names it
START = "from ray.scripts.scripts import main; main()"


def free_port() -> int:
    """Returns an unused TCP port."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(path: str, folder: str) -> None:
    connection = Client(path, "AF_UNIX")
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    types = {
        HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "decoder": {"resources": {"CPU": 2, "object_store_memory": STORE_NBYTES}, "node_config": {}, "max_workers": 1},
    }
    nothing: dict[str, Any] = {name: {} for name in ("auth", "docker", "file_mounts")}
    nothing |= {f"{when}_commands": [] for when in ("initialization", "setup", "head_setup", "worker_setup")}
    nothing |= {name: [] for name in ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")}
    config = {
        **nothing,  # the autoscaler requires these keys
        "file_mounts_sync_continuously": False,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 1.0,
        "cluster_name": "autoscaled",
        "max_workers": 1,
        "provider": {"type": "fake_multinode", "gcs_address": address},
        "available_node_types": types,
        "head_node_type": HEAD,
    }
    Path(folder, "autoscaling.json").write_text(json.dumps(config))
    options = [
        f"--autoscaling-config={folder}/autoscaling.json",
        f"--port={port}",
        f"--temp-dir={folder}",
        "--include-dashboard=false",
    ]
    options += ["--num-cpus=0", f"--object-store-memory={STORE_NBYTES}", "--disable-usage-stats"]
    os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise `ray start` asks for a token if another Ray has left one
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    subprocess.run([sys.executable, "-c", START, "start", "--head", *options], env=environment, check=True)
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    connection.send(address)
    try:
        while True:
            name, _ = connection.recv()
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            places = [actor["Address"]["NodeID"] for actor in actors().values() if actor["ActorClassName"] == "WorkerActor"]
            connection.send({"nodes": nodes, "actors": places}[name])
    except EOFError:
        os._exit(0)  # this is the first process of its PID namespace: all others end with it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
