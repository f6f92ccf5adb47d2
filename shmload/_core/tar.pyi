"""Scan tar headers, and whole shards."""

from typing_extensions import Buffer

END: int
FILE: int
OTHER: int
LONG_NAME: int
LONG_LINK: int
PAX: int
PAX_GLOBAL: int

class TarHeaders:
    """The state of a reader of one tar file between two headers."""

    @property
    def size(self) -> int: ...
    @property
    def name(self) -> bytes: ...
    @property
    def cause(self) -> str: ...
    def read_header(self, block: Buffer) -> int: ...
    def read_payload(self, kind: int, payload: Buffer) -> bool: ...

class TarScan:
    """The samples of a shard, found by reading every header of it."""

    num_samples: int
    num_members: int
    offset: int
    cause: str
    def __new__(cls, shard: Buffer) -> TarScan: ...
    @property
    def offsets(self) -> bytes: ...
    @property
    def sizes(self) -> bytes: ...
    @property
    def member_extensions(self) -> bytes: ...
    @property
    def first(self) -> bytes: ...
    @property
    def key_ends(self) -> bytes: ...
    @property
    def keys(self) -> bytes: ...
    @property
    def extensions(self) -> list[bytes]: ...

def split_name(name: Buffer) -> tuple[bytes, bytes] | None: ...
