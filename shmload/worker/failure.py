"""Send a worker's exception to the trainer: its type, text, traceback, and the sample that raised it.

The text equals that of torch's loader, so code that searches it keeps working. If the sample is known, a note on the exception
names it.
"""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple


class Failure(NamedTuple):
    """An error without the exception itself, which would keep frames alive or might not pickle.

    Attributes:
        kind: type of the exception.
        text: the formatted traceback.
        where: "in DataLoader worker process 0" or similar; empty if the text is complete.
        note: added to the exception, for example the sample.
        rows: rows of the batch that could not be read; empty if they are unknown, or if the batch failed as a whole.
        worker: state of the worker after the batch in torch mode, a dumped `Note`; empty if none is due.
    """

    kind: type[BaseException]
    text: str
    where: str
    note: str
    rows: tuple[int, ...] = ()
    worker: bytes = b""

    @classmethod
    def of(cls, error: BaseException, where: str, note: str) -> Failure:
        """Return the failure that describes an exception.

        Args:
            error: the exception.
            where: "in DataLoader worker process 0" or similar.
            note: text to add to the exception.
        """
        return cls(type(error), "".join(traceback.format_exception(error)), where, note)

    def dumps(self, capacity: int) -> bytes:
        """Return the failure as bytes, at most `capacity` unless that is less than a few hundred.

        A long traceback loses its middle, and a type that cannot be pickled becomes RuntimeError.
        """
        try:
            kind = pickle.dumps(self.kind)
            pickle.loads(kind)
        except Exception:
            kind = pickle.dumps(RuntimeError)
        text = self.text
        dumped = pickle.dumps((kind, *self[1:]))  # the type separately, because a Ray agent opens this and cannot import it
        while len(dumped) > capacity:
            keep = max(len(text) - (len(dumped) - capacity) - 100, 200) // 2
            text = f"{text[:keep]}\n... {len(self.text) - 2 * keep} characters left out ...\n{text[-keep:]}"
            dumped = pickle.dumps((kind, *self._replace(text=text, note=self.note[:400])[1:]))
            if keep <= 100:
                break
        return dumped

    @classmethod
    def loads(cls, dumped: bytes) -> Failure:
        """Return the failure from the result of `dumps`."""
        kind, *rest = pickle.loads(dumped)
        return cls(pickle.loads(kind), *rest)

    @staticmethod
    def with_worker(dumped: bytes, note: bytes) -> bytes:
        """Return a dumped failure with another `worker`."""
        return pickle.dumps((*pickle.loads(dumped)[:-1], note))

    def exception(self) -> BaseException:
        """Return the exception to raise in the trainer, of the original type and with torch's text."""
        message = f"Caught {self.kind.__name__} {self.where}.\nOriginal {self.text}" if self.where else self.text
        error: BaseException
        try:
            if self.kind is KeyError:
                error = KeyError(_Readable(message))
            elif getattr(self.kind, "message", None):
                error = self.kind(message=message)  # type: ignore[call-arg]  # torch does the same for such types
            else:
                error = self.kind(message)
        except Exception:  # an exception with an unusual constructor
            error = RuntimeError(message)
        if self.note:
            error.add_note(self.note)
        return error


def stop_iteration_error(error: StopIteration, source: str) -> RuntimeError:
    """Return the error for a StopIteration of a user's function, which would silently end the loop if next() raised it.

    Args:
        error: the StopIteration.
        source: description of the function that raised it, for the message.
    """
    made = RuntimeError(
        f"{source} raised StopIteration, which would have ended the pass early without an error: catch it there, or call "
        f"next(iterator, default) {error}".rstrip()
    )
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


class _Readable(str):
    """A string whose repr is itself, because KeyError shows the repr of its argument, which puts a traceback on one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


REMEDY = 'Raise sample_timeout_s if such samples are valid, or give on_error="skip" or "substitute" to continue without them'


def timeout_text(what: str, limit_s: float | None, worker: int, pid: int, stack: str, *, is_thread: bool = False) -> str:
    """Return the message for a worker that is replaced because a sample took too long, with the stack of the worker.

    Args:
        what: the sample, and the words up to the limit, such as "took longer than".
        limit_s: the limit.
        worker: number of the worker.
        pid: its process, or the system's number of the thread.
        stack: its Python stack.
        is_thread: the worker is a thread.
    """
    fate = f"(thread {pid}) cannot be killed, is left behind" if is_thread else f"(pid {pid}) was killed"
    return f"{what} sample_timeout_s={limit_s}: worker {worker} {fate} and is replaced. Its stack:\n{stack}\n"


def sample_at(key: object, epoch: int, row: int, step: int) -> str:
    """Return the name of a sample in messages."""
    return f"sample {key!s:.200} of epoch {epoch} (row {row} of batch {step})"
