from typing import Any

from typing_extensions import Buffer

BYTES: int
FLOATS: int
INTS: int

def feature(kind: int, values: Any) -> bytearray: ...
def message(parts: list[Any]) -> bytearray: ...

class RecordBuffer:
    nbytes: int
    def append(self, data: Buffer) -> int: ...
    def write_to(self, file: Any) -> None: ...
