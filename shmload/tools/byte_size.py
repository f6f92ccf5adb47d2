"""Write a number of bytes as text."""


def size_text(nbytes: int) -> str:
    """Return a size of memory or of a file as text, in bytes, KiB, MiB or GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
