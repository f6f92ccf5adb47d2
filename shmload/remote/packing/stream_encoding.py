"""StreamEncoder: encode the samples of an iterable to records, in order, in several processes.

The packing process reads the iterable and pickles each sample at once, because the iterable may reuse its buffers. Worker processes
encode the records. A task is a chunk of samples, and results are taken in order, so the number of workers changes no byte. For the
same reason, only types that are certainly the same in a worker are sent: plain values, arrays, tensors, images. A sample that
contains anything else is encoded in the packing process.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PosixPath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from shmload._core.watch import die_with
from shmload.remote.packing.encoded_samples import MemberCoding, prefix_and_members
from shmload.remote.packing.image_members import FloatImages, file_of_picture
from shmload.remote.packing.members import Members, Serializers

_CHUNK_NBYTES, _CHUNK_SIZE = 1 << 20, 64  # per task: pickled bytes, and samples
_TASKS_PER_WORKER = 3  # tasks that were submitted and not yet consumed
_PLAIN = (np.ndarray, PosixPath)
_BY_NAME = (type, FunctionType, BuiltinFunctionType)  # pickled as their names; pickles of arrays and tensors contain them
Handed = tuple[int, bytes, bool]  # number of a sample; its record, or its pickle for a worker to encode; whether it is a record


@dataclass(frozen=True)
class EncodedMembers:
    """An encoded sample: the prefix of its key, and its members."""

    prefix: str
    members: Members


@dataclass(frozen=True)
class StreamEncoder:
    """Encodes samples to records, here or in worker processes.

    Attributes:
        coding: transformation of the members.
        quality, serializers, float_images: as for `members_of`.
        first: number of the first sample, which is part of its key.
    """

    coding: MemberCoding
    quality: int | None
    serializers: Serializers = field(default_factory=dict)
    first: int = 0
    float_images: FloatImages = None

    def record(self, number: int, sample: Any) -> bytes:
        """Return the record of sample `number`.

        Raises:
            Exception: it cannot be encoded; a note gives its number.
        """
        try:
            found = sample if isinstance(sample, EncodedMembers) else self.encoded(sample)
            return b"".join(self.coding.record(f"{self.first + number:09d}", found.prefix, found.members))
        except Exception as error:
            error.add_note(f"sample {number} of the iterable")
            raise

    def encoded(self, sample: Any) -> EncodedMembers:
        """Return the encoded members of a sample, which later changes to the sample's values do not affect."""
        return EncodedMembers(*prefix_and_members(sample, self.quality, self.serializers, self.float_images))

    def records(self, handed: Iterable[Handed]) -> list[bytes]:
        """Return the records of samples that were converted by `handed`."""
        return [data if is_record else self.record(number, pickle.loads(data)) for number, data, is_record in handed]

    def handed(self, number: int, sample: Any) -> Handed:
        """Return the form in which a sample is sent to a worker: its pickle, or its record if it cannot be pickled safely."""
        if isinstance(sample, tuple) and hasattr(sample, "_asdict"):
            sample = sample._asdict()
        file = io.BytesIO()
        try:
            _HandingOver(file, protocol=5).dump(sample)
        except Exception:  # it cannot be pickled, for whatever reason
            return number, self.record(number, sample), True
        return number, file.getvalue(), False

    def all(self, stream: Iterable[tuple[int, Any]], num_workers: int, context: Any = None) -> Iterator[bytes]:
        """Yield the records of numbered samples, in order.

        Args:
            stream: pairs of number and sample.
            num_workers: processes that encode; 0 encodes in this process.
            context: a multiprocessing context, or the name of a start method.
        Raises:
            BrokenProcessPool: a worker was killed.
        """
        if not num_workers:
            for number, sample in stream:
                yield self.record(number, sample)
            return
        chunks = _chunks(self.handed(number, sample) for number, sample in stream)
        first = next(chunks, [])
        if (second := next(chunks, None)) is None:  # a single chunk is not worth a process
            yield from self.records(first)
            return
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context)
        pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(os.getpid(), self))
        tasks: deque[Future[list[bytes]]] = deque()
        try:
            for chunk in chain((first, second), chunks):
                with warnings.catch_warnings():  # the first submission forks, and workers only encode
                    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
                    tasks.append(pool.submit(_records, chunk))
                if len(tasks) > _TASKS_PER_WORKER * num_workers:
                    yield from tasks.popleft().result()
            while tasks:
                yield from tasks.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class _HandingOver(pickle.Pickler):
    """Pickles samples that consist of known types; any other type is an error."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (np.generic, np.dtype, *_BY_NAME)):
            return NotImplemented
        if kind.__module__ == "torch" and kind.__name__ == "Tensor":
            import torch

            return torch.from_numpy, (value.detach().cpu().numpy(),)
        if kind.__module__.startswith("PIL.") and hasattr(value, "getbands"):
            data = file_of_picture(value)
            if data is not None:
                return _picture, (data,)
            if kind.__module__ != "PIL.Image":
                return _same, (value.copy(),)
            return NotImplemented
        raise pickle.PicklingError(f"the type {kind.__qualname__} may be another in a worker")


def _picture(data: bytes) -> Any:
    """Open an unchanged image from the bytes of its file."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def _same(value: Any) -> Any:
    return value


def _chunks(handed: Iterable[Handed]) -> Iterator[list[Handed]]:
    chunk: list[Handed] = []
    nbytes = 0
    for one in handed:
        chunk.append(one)
        nbytes += len(one[1])
        if nbytes >= _CHUNK_NBYTES or len(chunk) == _CHUNK_SIZE:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


_encoder: StreamEncoder  # of a worker process


def _begin(parent: int, encoder: StreamEncoder) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the packing process handles the interrupt and stops its workers
    die_with(parent)
    _encoder = encoder


def _records(chunk: list[Handed]) -> list[bytes]:
    return _encoder.records(chunk)
