"""The layers of the package computed from its imports: on which floor each room is, and which rooms it imports.

`python -m tests.house` draws it. A room is a folder or a module directly in the package. It imports only from floors below its
own; every import counts, including those inside a function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shmload"
PICTURE = ROOT / "docs" / "house.svg"

STOREYS = (  # rooms, and their purpose
    (
        "errors faults introspect processes metrics lazy_imports torch_names ray_options _core",
        "errors, crash points, ranks, processes, compiled modules",
    ),
    ("shm schedule batch storage", "shared memory; order of samples; layout of a batch; stores and caches"),
    ("formats device", "one format per module; the calls of a GPU"),
    ("worker", "the worker's loop, ways to read a dataset, randomness"),
    ("engine", "orders to batches: ring, publishing, waiting"),
    ("modes sharing ray audit", "torch mode, seed mode; ranks in one ring; a cluster; records"),
    ("loader", "ShmLoader"),
    ("pipeline remote growing launch integrations cluster debug", "everything built on the loader"),
    ("tools", "bench, top, trace, inspect, doctor, verify"),
    ("cli", "one command per file"),
)
FLOORS = {room: floor for floor, (rooms, _) in enumerate(STOREYS) for room in rooms.split()}

WIDTH, HEIGHT, TOP, LEFT, RIGHT = 1280, 62, 16, 24, 860  # of the picture; height of a floor; margins of the rooms
BOX = 26


def files() -> list[Path]:
    """Returns all modules that are in a room: all but the package itself and `python -m shmload`."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")]


def room_of(path: Path) -> str:
    """Returns the room of a file."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Yields the rooms that a file imports anywhere, including its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "shmload" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for steps in (name.split(".") for name in names):
            if steps[0] == "shmload" and len(steps) > 1 and (PACKAGE / steps[1]).is_dir() | (PACKAGE / f"{steps[1]}.py").is_file():
                yield steps[1]


def imported_rooms() -> dict[str, set[str]]:
    """Returns the rooms that each room imports."""
    found: dict[str, set[str]] = {room_of(path): set() for path in files()}
    for path in files():
        found[room_of(path)].update(room for room in imports_of(path) if room != room_of(path))
    return found


def _nearest(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """Removes imports that are implied by others: rooms that are reached through another room."""

    def reached(room: str) -> set[str]:
        return below[room].union(*(reached(other) for other in below[room]))

    return {room: {o for o in others if not any(o in reached(p) for p in others - {o})} for room, others in below.items()}


def picture() -> str:
    """Returns the SVG."""
    places: dict[str, tuple[float, float, float]] = {}  # room -> center, top, width
    for floor, (rooms, _) in enumerate(STOREYS):
        widths = {room: 8.2 * len(room) + 18 for room in rooms.split()}
        gap, left = (RIGHT - LEFT - sum(widths.values())) / len(widths), float(LEFT)
        for room, width in widths.items():
            places[room] = left + (gap + width) / 2, TOP + (len(STOREYS) - 1 - floor) * HEIGHT, width
            left += gap + width
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + len(STOREYS) * HEIGHT}" '
        'font-family="ui-monospace, monospace" font-size="13">',
        f'<rect width="{WIDTH}" height="{TOP + len(STOREYS) * HEIGHT}" fill="#ffffff"/>',
    ]
    for floor, (_, what) in enumerate(STOREYS):
        y = TOP + (len(STOREYS) - 1 - floor) * HEIGHT
        if floor % 2:
            lines.append(f'<rect x="0" y="{y - 18}" width="{WIDTH}" height="{HEIGHT}" fill="#f4f6f8"/>')
        lines.append(
            f'<text x="{RIGHT + 4}" y="{y + 17}" fill="#57606a" font-size="10.5" font-family="sans-serif">{escape(what)}</text>'
        )
    for room, others in sorted(_nearest(imported_rooms()).items()):
        x, y, _ = places[room]
        for other in sorted(others):
            ox, oy, _ = places[other]
            middle = (y + BOX + oy) / 2
            lines.append(
                f'<path d="M{x:.0f} {y + BOX} C{x:.0f} {middle:.0f} {ox:.0f} {middle:.0f} {ox:.0f} {oy}" '
                'fill="none" stroke="#8c959f" stroke-width="1"/>'
            )
    for room, (x, y, width) in places.items():
        lines.append(
            f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="5" fill="#ddf4ff" stroke="#0969da"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{y + 17}" text-anchor="middle" fill="#0a3069">{escape(room)}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
