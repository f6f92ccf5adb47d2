"""The last time that a store was found not to answer, as all threads and processes of a reader know it.

An operation that has used up its tries because the store does not answer leaves a record. Operations that are still trying fail
with it at their next failure, and those that begin soon afterward do not wait for a silent store again. So the time to the error
is that of one operation, however many objects and workers there are. A read that succeeds removes the record.
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
    """One operation's failure.

    Attributes:
        text: the error that the operation raised; "": the store is to be tried anew by what begins after this.
        at: when, in seconds of the monotonic clock, which all processes of a machine share.
        is_silent: whether the store said nothing until its time ran out, so that each further try costs as much.
    """

    text: str
    at: float
    is_silent: bool


class Outage:
    """A record that processes share as a file. Picklable.

    A process ignores what was recorded before it began to use the store, so new workers try anew.

    Args:
        path: of the file; it exists only while there is a record.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid, self._begun = os.getpid(), monotonic()

    def record(self, text: str, begun: float, *, is_silent: bool) -> None:
        """Record that an operation has used up its tries, unless the store is tried anew since the operation began.

        Args:
            text: the error.
            begun: when the operation began, in seconds of the monotonic clock.
            is_silent: as of OutageRecord.
        """
        known = self._read()
        if known is None or known.text or known.at < begun:
            self._write(OutageRecord(text, monotonic(), is_silent))

    def since(self, begun: float) -> OutageRecord | None:
        """Return the record if it was made after that time and after this process began to use the store.

        Args:
            begun: in seconds of the monotonic clock.
        """
        if self._pid != os.getpid():
            self._pid, self._begun = os.getpid(), monotonic()
        found = self._read()
        return found if found is not None and found.text and found.at >= max(begun, self._begun) else None

    def try_anew(self) -> None:
        """Replace the record if there is one, so that operations that begin from now on try the store."""
        if os.path.exists(self._path):
            self._write(OutageRecord("", monotonic(), is_silent=False))

    def end(self) -> None:
        """Remove the record, because the store answers."""
        with contextlib.suppress(OSError):
            if os.path.exists(self._path):  # which costs less than a removal that fails
                os.unlink(self._path)

    def _read(self) -> OutageRecord | None:
        try:
            with open(self._path, "rb") as file:
                found = OutageRecord(**json.loads(file.read()))
            return found if found.at <= monotonic() else None  # else it is of before the machine was started
        except (OSError, ValueError, TypeError):  # there is none, or another program wrote it
            return None

    def _write(self, record: OutageRecord) -> None:
        half = f"{self._path}.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # a full disk, a folder that has ended: each operation is tried as often as it may
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
        self.__init__(state["_path"])  # type: ignore[misc]  # as a new one
