"""Write a number of bytes as text."""

from shmload.tools.counted import counted


def size_text(nbytes: int) -> str:
    """Return a size of memory or of a file as text, in bytes, KiB, MiB or GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return counted(nbytes, "byte") if unit == "bytes" else f"{size:,.1f} {unit}"
