"""A worker's exception on its way to the trainer: type, text, traceback, which sample.

The text is what torch's loader says, so that code which looks into it goes on working; where the sample is known, the exception
carries it as a note.

How a process ended, in words.

What is said of a sample that took longer than `sample_timeout_s`, wherever its worker was.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """What went wrong, without the exception itself (which would keep frames alive, or not pickle)."""

    kind: type[BaseException]
    text: str
    where: str  # empty: the text says all
    note: str
    rows: tuple[int, ...] = ()  # of the batch, which could not be read; empty: unknown, or the batch as a whole failed

    @classmethod
    def of(cls, error: BaseException, where: str, note: str) -> Failure:
        """From an exception being handled."""
        return cls(type(error), "".join(traceback.format_exception(error)), where, note)

    def dumps(self, capacity: int) -> bytes:
        """At most `capacity` bytes; a long traceback loses its middle, a type that cannot travel becomes RuntimeError."""
        kind: type[BaseException] = self.kind
        try:
            pickled_kind = pickle.dumps(kind)
            pickle.loads(pickled_kind)
        except Exception:
            kind = RuntimeError
        failure, text = self._replace(kind=kind), self.text
        dumped = pickle.dumps(tuple(failure))
        while len(dumped) > capacity:
            keep = max(len(text) - (len(dumped) - capacity) - 100, 200) // 2
            text = f"{text[:keep]}\n... {len(self.text) - 2 * keep} characters left out ...\n{text[-keep:]}"
            dumped = pickle.dumps(tuple(failure._replace(text=text, note=failure.note[:400])))
            if keep <= 100:
                break
        return dumped

    @classmethod
    def loads(cls, dumped: bytes) -> Failure:
        """Inverse of `dumps`."""
        return cls(*pickle.loads(dumped))

    def exception(self) -> BaseException:
        """The exception to raise in the trainer: of the original type, with torch's text."""
        message = f"Caught {self.kind.__name__} {self.where}.\nOriginal {self.text}" if self.where else self.text
        error: BaseException
        try:
            if self.kind is KeyError:
                error = KeyError(_Readable(message))
            elif getattr(self.kind, "message", None):
                error = self.kind(message=message)  # type: ignore[call-arg]  # as torch does for such types
            else:
                error = self.kind(message)
        except Exception:  # an exception with an unusual constructor
            error = RuntimeError(message)
        if self.note:
            error.add_note(self.note)
        return error


def no_end(error: StopIteration, who: str) -> RuntimeError:
    """The error for a StopIteration of a user's function: raised out of next() it would end the loop, and nobody would hear of it.

    Args:
        who: raised it, for people.
    """
    made = RuntimeError(
        f"{who} raised StopIteration, which would have ended the pass as if there were no more: catch it there, or call "
        f"next(iterator, default) {error}".rstrip()
    )
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


class _Readable(str):
    """A string whose repr is itself: KeyError shows the repr of its argument, which makes a traceback one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe_exit(code: Any) -> str:
    """What a process's exit code says, in words."""
    if code is None:
        return "is still running"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"


REMEDY = 'Raise sample_timeout_s if such a sample is all right, or give on_error="skip" or "substitute" to go on without it'


def timeout_text(what: str, limit_s: float | None, worker: int, pid: int, stack: str) -> str:
    """What took longer than its limit, whose worker was ended over it, and where that was."""
    return f"{what} sample_timeout_s={limit_s}: worker {worker} (pid {pid}) was ended and is replaced. Where it was:\n{stack}\n"


def sample_at(key: object, epoch: int, row: int, step: int) -> str:
    """A sample by its place."""
    return f"sample {key} of epoch {epoch} (row {row} of batch {step})"
