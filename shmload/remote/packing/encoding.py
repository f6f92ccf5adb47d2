"""The dataset that a packing's loader reads: position in the packing order -> the sample's members as they stand in a shard.

Workers do all of the encoding, headers and padding included, in the slot of the ring. The trainer writes out what lies there.
Where a sample comes to lie depends on its position alone, so the number of workers changes no byte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from shmload.formats.tar.header import BLOCK, member_header, member_name
from shmload.remote.packing.members import Members, OpenFile, Payload
from shmload.remote.packing.sources import Source
from shmload.schedule.permutation import Permutation
from shmload.worker.sample_rng import begin_sample, kept_generators

RECORD = "record"


class EncodedSamples:
    """Records of samples: their members, one after the other, each filled up to a block.

    A dataset that draws random numbers (augmentations) draws them from (seed, index of the sample), so that a packing that goes
    on after a kill, or with other workers, makes the same bytes.

    Args:
        source: the samples.
        seed: of the order, and of what samples draw.
        restart_markers: JPEG files get restart markers, without loss.
    """

    schema = {RECORD: ("uint8", (None,))}  # noqa: RUF012  # as users write it

    def __init__(self, source: Source, *, seed: int, restart_markers: bool) -> None:
        self.source, self.seed, self.restart_markers = source, seed, restart_markers
        self.order = Permutation(len(source), seed=seed)
        self._width = max(8, len(str(len(source) - 1)))

    def __len__(self) -> int:
        return len(self.source)

    def read_batch_into(self, positions: Any, out: Any) -> None:
        """Writes the records at positions of the order, end to end."""
        indices = self.order.take(np.asarray(positions, np.int64)).tolist()
        if self.source.draws:
            with kept_generators():
                records = [self.pieces(index) for index in indices]
        else:
            records = [self.pieces(index) for index in indices]
        room = out.reserve(RECORD, [sum(map(len, pieces)) for pieces in records])
        view, at = memoryview(room), 0
        for pieces in records:
            for piece in pieces:
                part = view[at : at + len(piece)]
                if isinstance(piece, OpenFile):
                    piece.read_into(part)
                else:
                    part[:] = piece
                at += len(part)

    def record(self, index: int) -> bytes:
        """The record of a sample."""
        return b"".join(map(_bytes, self.pieces(index)))

    def pieces(self, index: int) -> list[Payload]:
        """The record of a sample: headers, payloads and what fills them up.

        Raises:
            Exception: as reading it raised; a note names the sample.
        """
        try:
            return self._pieces(index)
        except Exception as error:
            error.add_note(f"sample {index} of the dataset")
            raise

    def _pieces(self, index: int) -> list[Payload]:
        if self.source.draws:
            begin_sample(self.seed, 0, index, 0, reseed=True)
        prefix, members = self.source.members(index)
        if self.restart_markers:
            members = with_markers(members)
        number = f"{index:0{self._width}d}"
        pieces: list[Payload] = []
        for extension, data in members:
            name = member_name(prefix + number, extension) if prefix else number.encode() + _behind(extension)
            pieces += [member_header(name, len(data)), data]
            if len(data) % BLOCK:
                pieces.append(bytes(-len(data) % BLOCK))
        return pieces


@lru_cache(maxsize=1024)
def _behind(extension: str) -> bytes:
    """What stands in a member's name behind a key that is a number; checked once."""
    return member_name("0", extension)[1:]


def with_markers(members: Members) -> Members:
    """The members, JPEG files among them with restart markers."""
    from shmload.formats.images.restart import with_restart_markers

    is_jpeg = [extension.rpartition(".")[2] in ("jpg", "jpeg") for extension, _ in members]
    return [
        (extension, with_restart_markers(_bytes(data)) if jpeg else data)
        for jpeg, (extension, data) in zip(is_jpeg, members, strict=True)
    ]


def _bytes(payload: Payload) -> bytes:
    return payload.read() if isinstance(payload, OpenFile) else payload
