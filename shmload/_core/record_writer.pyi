"""Frame records, and encode Examples, into one growing buffer."""

from typing import Any

from typing_extensions import Buffer

BYTES: int
FLOATS: int
INTS: int

class RecordBuffer:
    nbytes: int
    def append(self, data: Buffer) -> int: ...
    def append_example(self, fields: list[Any]) -> int: ...
    def append_sequence(self, context: list[Any], feature_lists: list[Any]) -> int: ...
    def write_to(self, file: Any) -> None: ...
