"""A record of a store's outage, shared by all threads and processes of a reader.

An operation that has used up its tries because the store does not answer leaves a record. Operations that are still trying fail
with it at their next failure, and those that begin soon afterward do not wait for a silent store again. So the error appears after
the time of one operation, however many objects and workers there are. A successful read removes the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

__all__ = ["Outage", "OutageRecord"]


@dataclass(frozen=True)
class OutageRecord:
    """The failure of one operation.

    Attributes:
        text: message of the error that the operation raised; "" means that operations which begin later must try the store again.
        at: time of the failure, in seconds of the monotonic clock, which all processes of a machine share.
        is_silent: whether the store did not answer until the time ran out, so that each further try would cost as much.
    """

    text: str
    at: float
    is_silent: bool


class Outage:
    """The record of a store's outage, which processes share through a file. Picklable.

    A process ignores records from before it began to use the store, so new workers try again.

    Args:
        path: path of the file, which exists only while there is a record.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid, self._begun = os.getpid(), monotonic()

    def record(self, text: str, begun: float, *, is_silent: bool) -> None:
        """Record that an operation has used up its tries, unless `try_again` was called after the operation began.

        Args:
            text: message of the error.
            begun: time at which the operation began, in seconds of the monotonic clock.
            is_silent: as in `OutageRecord`.
        """
        known = self._read()
        if known is None or known.text or known.at < begun:
            self._write(OutageRecord(text, monotonic(), is_silent))

    def since(self, begun: float) -> OutageRecord | None:
        """Return the record if it was made after `begun` and after this process began to use the store.

        Args:
            begun: time in seconds of the monotonic clock.
        """
        if self._pid != os.getpid():
            self._pid, self._begun = os.getpid(), monotonic()
        found = self._read()
        return found if found is not None and found.text and found.at >= max(begun, self._begun) else None

    def try_again(self) -> None:
        """Let operations that begin from now on try the store, although there is a record."""
        if os.path.exists(self._path):
            self._write(OutageRecord("", monotonic(), is_silent=False))

    def end(self) -> None:
        """Remove the record, because the store answers."""
        with contextlib.suppress(OSError):
            if os.path.exists(self._path):  # cheaper than an unlink that fails
                os.unlink(self._path)

    def _read(self) -> OutageRecord | None:
        try:
            with open(self._path, "rb") as file:
                found = OutageRecord(**json.loads(file.read()))
            return found if found.at <= monotonic() else None  # a later time is from before the machine was last booted
        except (OSError, ValueError, TypeError):  # there is no record, or another program wrote the file
            return None

    def _write(self, record: OutageRecord) -> None:
        half = f"{self._path}.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # the disk is full or the folder was removed: each operation then uses all of its tries
            try:
                with open(half, "x") as file:
                    json.dump(asdict(record), file)
                os.replace(half, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(half)
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"])  # type: ignore[misc]  # initialize like a new object
