"""The agent process: it claims batches from the ring, sends them to Ray actors, and writes their replies into the ring.

The agent is started with `python -m` and reads its settings from standard input, so that the user's program is not imported again.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import WorkerRing
from shmload._core.watch import die_with
from shmload.processes import private_fds
from shmload.ray.actor_set import ActorSet
from shmload.ray.agent_config import ARRIVED, AgentConfig
from shmload.ray.dispatcher import Dispatcher, start_or_exit
from shmload.ray.local_processes import LocalProcesses
from shmload.ray.messages import ActorSetting
from shmload.ray.worker_proxy import WorkerProxy
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.process import GONE, open_memory


def wait_for_job() -> None:
    """Wait until the trainer has written the pickled job."""
    if sys.stdin.buffer.read(len(ARRIVED)) != ARRIVED:
        os._exit(GONE)  # the trainer could not write the job, and its loader has failed


def main() -> None:
    """Run the agent until the ring closes or the trainer ends."""
    config: AgentConfig = pickle.load(sys.stdin.buffer)
    links = config.links
    die_with(links[0].trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a worker
    try:
        control = open_memory(links[0].control_path)
        control_fd = private_fds.keep(open_segment(links[0].control_path))
        ready, grants = (Doorbell.attach(name) for name in (links[0].ready_bell, links[0].grants_bell))
        orders = {link.orders_bell: Doorbell.attach(link.orders_bell) for link in links}
        memory = open_memory(links[0].pickled_job_path)
        pickled_job: NDArray[np.uint8] = np.ndarray(links[0].pickled_job_nbytes, np.uint8, memory)  # type: ignore[arg-type]  # a buffer
    except FileNotFoundError:
        os._exit(GONE)  # the loader was closed before this process had started
    rings = [[WorkerRing(control, link.worker_id) for _ in range(config.num_ahead)] for link in links]
    sizes = rings[0][0].text_capacity, rings[0][0].layout_capacity
    settings = [ActorSetting(link, config.paths, *sizes, config.sample_timeout_s) for link in links]
    actors = ActorSet(config, pickled_job, settings, wait_for_job, control_fd)
    del memory, pickled_job
    by_bell: dict[str, list[list[WorkerProxy]]] = {name: [] for name in orders}
    for link, of_worker in zip(links, rings, strict=True):
        by_bell[link.orders_bell].append(
            [WorkerProxy(ring, actors, ready=ready, grants=grants, open_memory=open_memory) for ring in of_worker]
        )
    local = None
    if config.num_local and config.is_seeded:  # in torch mode, no worker may take another's orders
        processes = range(len(links), len(links) + config.num_local)
        local = LocalProcesses(rings[0][0], processes, config.num_ordered)
    dispatchers = [Dispatcher(actors, proxies, orders[name], local) for name, proxies in by_bell.items()]
    threading.Thread(target=actors.connect, daemon=True).start()
    actors.wait(lambda: not rings[0][0].is_closing)
    threads = [start_or_exit(dispatcher.run) for dispatcher in dispatchers]
    actors.watch(lambda: not rings[0][0].is_closing)
    for thread in threads:
        thread.join()
    os._exit(0)  # an orderly shutdown takes longer, and is not needed because Ray cleans up after a driver


if __name__ == "__main__":
    main()
