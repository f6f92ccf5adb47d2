"""Options of a command line that may be repeated or contain commas."""

from collections.abc import Iterable

from shmload.tools.object_reference import UsageError


def names(values: Iterable[str]) -> list[str]:
    """Return the values of an option, which may be repeated or contain commas, as one list without repetitions."""
    return list(dict.fromkeys(part.strip() for value in values for part in value.split(",") if part.strip()))


def numbers(option: str, values: Iterable[str]) -> tuple[int, ...]:
    """Return the values of an option, which may be repeated or contain commas, as integers without repetitions.

    Raises:
        UsageError: one of them is not an integer.
    """
    found = names(values)
    for text in found:
        if not text.removeprefix("-").isdecimal():
            raise UsageError(f"{option}: needs whole numbers, one or several with commas between, given {text!r}")
    return tuple(map(int, found))
