"""Programs that start in a moment, as forks of an interpreter that has imported torch, numpy and shmload.

A program finds itself in `__main__`, with its own folder, environment, arguments, streams and warnings, and its end is that of any
interpreter: exit handlers run, and modules are destroyed. Only its first imports have been made. So tests of imports, and of the
interpreter's own options, start new interpreters instead.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

_server: _Server | None = None


def run_program(script: Path, *, strict: bool, env: dict[str, str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a program like `python [-W error] script`, whose `env` has the PYTHONPATH.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `deadline_s`, and has been killed.
    """
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        code = _server.run([str(script)], strict, env, [nothing.fileno(), out.fileno(), err.fileno()], deadline_s)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([str(script)], code, out.read(), err.read())


def server_pid() -> int | None:
    """Returns the process id of the interpreter, if it has been started."""
    return None if _server is None else _server.process.pid


class _Server:
    """The interpreter, in another process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = f"from tests.warm_interpreter import serve; serve({theirs.fileno()})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )

    def run(self, argv: list[str], strict: bool, env: dict[str, str], fds: list[int], deadline_s: float) -> int:
        request = {"argv": argv, "strict": strict, "env": env, "cwd": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        pid = int(self._socket.recv(100))
        self._socket.settimeout(deadline_s)
        try:
            return int(self._socket.recv(100))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._socket.settimeout(None)
            self._socket.recv(100)
            raise subprocess.TimeoutExpired(argv, deadline_s) from None
        finally:
            self._socket.settimeout(None)


def serve(fd: int) -> None:
    """Forks a process for each request until the socket is closed. In such a process, runs the program and returns."""
    for module in ("numpy", "torch", "shmload.loader"):
        importlib.import_module(module)
    with socket.socket(fileno=fd) as connection:
        while True:
            request, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            if not request:
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of the threads of numpy's library, which survives forks
                pid = os.fork()
            if not pid:
                break
            for each in fds:
                os.close(each)
            connection.send(str(pid).encode())
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    _become(json.loads(request), fds)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Runs a program in this process as `__main__`."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    sys.argv[:] = request["argv"]
    script = sys.argv[0]
    inherited = [path for path in sys.path if path and path not in os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.path[:] = [str(Path(script).parent), *os.environ["PYTHONPATH"].split(os.pathsep), *inherited]
    if request["strict"]:
        sys.warnoptions.append("error")  # for interpreters that the program starts by spawn
        warnings.simplefilter("error")
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __file__=script, __spec__=None, __doc__=None, __builtins__=__builtins__)
    exec(compile(Path(script).read_text(), script, "exec"), main)
