"""Creates empty replacements of GPU libraries, so that a torch built for GPUs imports on a machine without one.

    python -m tests.matrix.stubs SITE_PACKAGES FOLDER

On PyPI most releases of torch for x86-64 are CUDA builds that depend on gigabytes of further packages, of which nothing is called
without a GPU. This program reads the libraries that torch's need and that are missing, and creates each from functions that
return 100, which means "no device" in the CUDA runtime. With FOLDER in LD_LIBRARY_PATH, `torch.cuda.is_available()` is False and
the CPU works.

Needs a C compiler and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def make(site: Path, folder: Path) -> list[str]:
    """Writes the missing libraries that those in `site/torch/lib` need.

    Args:
        site: where torch is installed.
        folder: the folder to create and write to.

    Returns:
        The names of the libraries.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = sorted(site.glob("torch/lib/*.so*"))
    needed = {name for library in libraries for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("-d", library))}
    missing = sorted(needed - {library.name for library in libraries} - _known())
    versions: dict[str, set[str]] = defaultdict(set)  # library -> its versions
    symbols: dict[str, set[str]] = defaultdict(set)  # version, or "" for none -> symbols
    defined: set[str] = set()
    for library in libraries:
        file = ""
        for line in _readelf("-V", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)\s+Flags", line):
                versions[file].add(found[1])
        for line in _readelf("--dyn-syms", library).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] != "UND":
                defined.add(name)
            elif fields[4] == "GLOBAL":
                symbols[version.lstrip("@")].add(name)
    rest = symbols[""] - defined - _in_process()
    for name in missing:
        _write(folder / name, {version: symbols[version] for version in versions[name]}, rest if name == missing[0] else ())
    return missing


def _write(path: Path, versioned: dict[str, set[str]], plain: Iterable[str]) -> None:
    names = set(plain).union(*versioned.values())
    source, script = path.with_suffix(".c"), path.with_suffix(".map")
    source.write_text("".join(_function(name) for name in sorted(names)))
    script.write_text(
        "".join(f"{version} {{ {' '.join(f'{name};' for name in sorted(of))} }};\n" for version, of in versioned.items() if of)
    )
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", "-o", path, source]
    subprocess.run(command + ([f"-Wl,--version-script={script}"] if script.stat().st_size else []), check=True)
    source.unlink()
    script.unlink()


def _function(name: str) -> str:
    if re.search(r"(Error|Status)_?(String|Name)$", name, re.IGNORECASE):
        return f'const char *{name}(void) {{ return "there is no GPU: an empty library"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def _readelf(what: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", what, library], capture_output=True, text=True, check=True).stdout


def _known() -> set[str]:
    """Returns the libraries that the dynamic loader finds by itself."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^\s+(\S+) \(", cache, re.MULTILINE))


def _in_process() -> set[str]:
    """Returns the libraries that Python itself loads; torch's libraries that are Python modules use those."""
    files = [Path(sys.executable).resolve(), *Path(sys.base_prefix, "lib").glob("libpython3.*.so*")]
    lines = "".join(_readelf("--dyn-syms", file) for file in files).splitlines()
    return {line.split()[7].partition("@")[0] for line in lines if len(line.split()) > 7 and line.split()[6] != "UND"}


if __name__ == "__main__":
    print("\n".join(make(Path(sys.argv[1]), Path(sys.argv[2]))))
