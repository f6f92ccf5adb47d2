"""The work behind the commands of `shmload`. In the package, only the command line (`cli/`) imports these files."""


def readable(nbytes: int) -> str:
    """Return a number of bytes as text, in bytes, KiB, MiB or GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
