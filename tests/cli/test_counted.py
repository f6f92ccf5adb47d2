"""Numbers of things in the output of commands."""

import pytest

from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2000, "batch", "2,000 batches"),
        (1, "batch", "1 batch"),
        (2, "file", "2 files"),
    ],
)
def test_noun_is_in_the_plural_unless_there_is_one(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_size_of_one_byte_is_in_the_singular() -> None:
    assert (size_text(1), size_text(2)) == ("1 byte", "2 bytes")
