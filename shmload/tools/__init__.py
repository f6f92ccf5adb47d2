"""What shows, measures and checks loaders. Only the command line imports it."""


def readable(nbytes: int) -> str:
    """Bytes in the unit that suits."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
