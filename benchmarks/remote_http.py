"""Measure the rate of reading the photos of benchmarks/remote.py from a server that costs almost nothing.

Method: The same shards are files, which nginx sends from the page cache by sendfile. ShmLoader over `RemoteDataset.indexed()`
with an empty cache folder and webdataset 1.0.2 over the same URLs, by curl and torch's DataLoader, take turns in each round,
each in a process of its own; 2 workers, batches of 64, whole passes, without imports.

How to read: An S3 gateway on the same two cores takes half of the available CPU, so with it no reader can be three times as
fast as webdataset: even the client library that reads and drops the same bytes is only 2.3 to 2.5 times as fast. This benchmark
reads the same data without that gateway.

Result (2 cores, 3 rounds, quiet machine): 1,075 MB/s and 1.13 s of CPU (server 0.18), compared with 324 MB/s and 4.47 s (server
0.10): 3.3 times the rate for a quarter of the readers' CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import remote
from benchmarks.common import Result, Row, Settings, in_order, main

CONFIG = """{user} daemon off; worker_processes 1; error_log {folder}/log; pid {folder}/pid;
events {{}}
http {{ access_log off; sendfile on; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; server {{ listen 127.0.0.1:{port}; root {root}; }} }}
"""


@contextmanager
def served(root: str) -> Iterator[tuple[str, int]]:
    """Starts a server of a folder's files, and yields its URL and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "nginx.conf")
        config.write_text(CONFIG.format(user="" if os.geteuid() else "user root;", folder=folder, port=port, root=root))
        with subprocess.Popen(["nginx", "-e", f"{folder}/log", "-c", str(config)], cwd=folder) as server:
            try:
                deadline = time.monotonic() + 10
                while time.monotonic() < deadline:
                    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                        break
                yield f"http://127.0.0.1:{port}", server.pid
            finally:
                server.terminate()


def run(case: str, url: str, folder: str) -> None:
    """Runs one case in this process."""
    for module in ("webdataset", "shmload.loader", "shmload.remote.remote_dataset"):
        importlib.import_module(module)
    remote.touch_memory(os.path.dirname(folder))
    began, mine = time.perf_counter(), time.process_time()
    if case == "shmload":
        nbytes = remote.read_view(url=url, cache_folder=folder)
    else:
        names = json.loads(Path(os.environ["SHARDS"]).read_text())
        nbytes = remote.read_webdataset([f"{url}/{name}" for name in names])
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() - mine + used.ru_utime + used.ru_stime
    print(json.dumps({"nbytes": nbytes, "s": seconds, "cpu_s": cpu_s}))


def measure(settings: Settings) -> Result:
    """Reads the shards in both ways, in turn."""
    import psutil

    from shmload.storage.local_store import LocalStore

    if shutil.which("nginx") is None:
        print("left out: nginx is not installed", file=sys.stderr)
        return Result([])
    found: dict[str, list[dict[str, float]]] = {"shmload": [], "webdataset": []}
    with tempfile.TemporaryDirectory() as root:
        remote.pack_into(LocalStore(Path(root)))
        names = Path(root, "names.json")
        names.write_text(json.dumps(sorted(str(path.relative_to(root)) for path in Path(root).rglob("*.tar"))))
        with served(root) as (url, pid):
            for number in range(settings.rounds):
                for case in in_order(found, number):
                    before = sum(sum(each.cpu_times()[:2]) for each in psutil.Process(pid).children())
                    with tempfile.TemporaryDirectory() as place:
                        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.remote_http", "case", case, url]
                        done = subprocess.run(
                            [*command, f"{place}/cache"], capture_output=True, text=True, env={**os.environ, "SHARDS": str(names)}
                        )
                    if done.returncode:
                        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
                    one = json.loads(done.stdout.splitlines()[-1])
                    one["server_s"] = sum(sum(each.cpu_times()[:2]) for each in psutil.Process(pid).children()) - before
                    found[case].append(one)
                    print(f"{case}: {one}", file=sys.stderr)
    medians = {case: {name: statistics.median(one[name] for one in values) for name in values[0]} for case, values in found.items()}
    beside = ", ".join(
        f"{case} {m['nbytes'] / m['s'] / 1e6:.0f} MB/s, {m['cpu_s']:.2f} s of CPU, server {m['server_s']:.2f}"
        for case, m in medians.items()
    )
    mine, theirs = medians["shmload"], medians["webdataset"]
    rate, cpu = theirs["s"] / mine["s"], theirs["cpu_s"] / mine["cpu_s"]
    return Result(
        [
            Row("cold over webdataset, by the wall", rate, "x", beside, ">= 3x", rate >= 3),
            Row("the same by the readers' CPU", cpu, "x", "", ">= 3x", cpu >= 3),
        ],
        {"cases": found},
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        run(*sys.argv[2:5])
    else:
        main("remote_http", __doc__, measure)
