"""Columns of a batch in a slot."""

from collections.abc import Callable, Iterable
from typing import Any

class Part:
    def put(self, value: object, row: int) -> bool: ...

class DictPart(Part):
    def __new__(cls, keys: Iterable[object], parts: Iterable[Part]) -> DictPart: ...

class SequencePart(Part):
    def __new__(cls, kinds: Iterable[type], parts: Iterable[Part]) -> SequencePart: ...

class Column(Part):
    row_nbytes: int
    def __new__(cls, address: int, row_nbytes: int, keeper: object) -> Column: ...

class IntColumn(Column):
    def __new__(cls, address: int, row_nbytes: int, keeper: object) -> IntColumn: ...

class FloatColumn(Column):
    def __new__(cls, address: int, row_nbytes: int, keeper: object) -> FloatColumn: ...

class BoolColumn(Column):
    def __new__(cls, address: int, row_nbytes: int, keeper: object) -> BoolColumn: ...

class ArrayColumn(Column):
    def __new__(cls, address: int, row_nbytes: int, keeper: object, rows: Any, is_scalar: bool) -> ArrayColumn: ...

class TensorColumn(Column):
    def __new__(
        cls, address: int, row_nbytes: int, keeper: object, rows: Any, code: int, is_plain: Callable[[Any], bool]
    ) -> TensorColumn: ...

def copy_from(to: int, source: int, nbytes: int) -> None: ...
