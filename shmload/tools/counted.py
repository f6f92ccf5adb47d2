"""Write a number of things as text."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1: "1 file", "2,000 files", "3 batches"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 's')) else 's'}"
