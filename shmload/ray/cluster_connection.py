"""Join a Ray cluster, or explain why it cannot be joined."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

from shmload.errors import ClusterUnreachable

HEAD_S = 10.0  # longest time to connect to the head, because Ray itself would retry for two minutes


def join_cluster(given: str, timeout_s: float = HEAD_S) -> None:
    """Make this process a driver of a cluster.

    Args:
        given: the address of the head; "auto" means RAY_ADDRESS, or the cluster that Ray finds on this machine.
        timeout_s: seconds that the head may take to accept a connection, at most HEAD_S.
    Raises:
        ClusterUnreachable: no cluster answers at this address.
    """
    import ray

    address = (os.environ.get("RAY_ADDRESS") or given) if given == "auto" else given
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), min(timeout_s, HEAD_S)).close()
        ray.init(address=address, logging_level=logging.WARNING, namespace="shmload")
    except Exception as error:
        raise unreachable_error(given, error) from error


def current_cluster_address() -> str:
    """Return the address of the cluster that this process belongs to (a worker of Ray Train, for example), otherwise "auto"."""
    ray: Any = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else "auto"


def unreachable_error(address: str, error: Exception) -> ClusterUnreachable:
    """Return the error for a cluster that cannot be joined."""
    cause: BaseException | None = error
    while cause is not None:
        if "AuthenticationError" in str(cause):  # Ray puts it into the message of another error
            return ClusterUnreachable(
                f"the Ray cluster at address={address!r} requires Ray's token: set RAY_AUTH_MODE=token in this program's "
                "environment, and copy the token (~/.ray/auth_token on the head) to each other machine"
            )
        cause = cause.__cause__ or cause.__context__
    return ClusterUnreachable(
        f"there is no Ray cluster at address={address!r} ({type(error).__name__}: {error}). Start one with "
        "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
    )
