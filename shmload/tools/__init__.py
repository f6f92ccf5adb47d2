"""Tools that show, measure and check loaders. Only the command line imports them."""


def readable(nbytes: int) -> str:
    """Return a number of bytes as text, in bytes, KiB, MiB or GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
