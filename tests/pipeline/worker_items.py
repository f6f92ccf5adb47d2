"""Functions of items that every start method can send to workers; some of them fail."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import torch


def unchanged(item: Any) -> Any:
    return item


def fails_at_3(x: int) -> int:
    if x == 3:
        raise KeyError(f"broken {x}")
    return x


def stops_at_3(x: int) -> int:
    if x == 3:
        raise StopIteration
    return x


def kills_at_3(x: int) -> int:
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def hangs_at_3(x: int) -> int:
    if x == 3:
        threading.Event().wait()
    return x


def unsendable_at_70(x: int) -> Any:
    return threading.Lock() if x == 70 else x


class KillsOnce:
    """Kills the first worker that reaches item 3."""

    def __init__(self, folder: str) -> None:
        self.flag = os.path.join(folder, "killed")

    def __call__(self, x: int) -> int:
        if x == 3 and not os.path.exists(self.flag):
            os.close(os.open(self.flag, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Squares:
    """A function that decodes in place."""

    schema = {"x": (np.int64, ()), "row": (torch.float32, (3,))}

    def read_into(self, item: int, out: Any) -> None:
        if item == 50:
            raise ValueError("no picture")
        out["x"] = item * item
        out["row"][:] = item


def mixed(x: int) -> Any:
    return {
        "ragged": np.arange(x % 3),
        "text": f"item {x}",
        "object": {x},
        "number": x,
        "tensor": torch.full((2,), x),
        "array": np.full(2, x),
    }


def as_array(x: int) -> Any:
    return np.full(3, x)


def as_dict(x: int) -> dict[str, int]:
    return {"x": x}


def kills_at_9(x: int) -> int:
    if x == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def fails_at_7(x: int) -> int:
    if x == 7:
        raise ValueError("seven")
    return x
