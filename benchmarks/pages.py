"""Write the figures of a run into docs/measurements.md (every row), and into README.md and docs/index.md (the rows of FRONT).

Each place is between two marks, and only `python -m benchmarks.against --write` writes there. A run of all benchmarks writes
everything. A run of some benchmarks (after a change that affects them) replaces only their sections, which then name that run.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Row, figure
from shmload.tools.bench.spread import Spread

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- python -m benchmarks.against --write writes from here -->\n", "<!-- to here -->\n"
MEASURED = "Measured on"  # begins the line that describes a run, for the whole page or for a section from another run
PAGE = Path("docs/measurements.md")
README: tuple[tuple[str, str, str], ...] = (  # text for readers, benchmark, row
    (
        "a Python dataset as it is, 3x224x224 uint8: samples/s over torch's",
        "python_dataset",
        "Python dataset, batch 64: samples/s over torch",
    ),
    ("the same, over torch's without workers", "python_dataset", "Python dataset, batch 64: samples/s over torch without workers"),
    ("photos, the same decoder in both: photos/s over torch's", "photos", "photos: photos/s over torch"),
    ("trainer's CPU per batch of 64 rows, one field of 64 float32", "trainer_cpu", "trainer CPU per batch, one field"),
    (
        "tar of 4 KiB and a label: webdataset's CPU per sample over shmload's",
        "tar",
        "tar of 4 KiB npy + cls, CPU a sample: webdataset over shmload",
    ),
    ("windows of 1,025 tokens: CPU per window", "tokens", "windows of 1,025 tokens, CPU a window"),
)
FRONT = {Path("README.md"): README, Path("docs/index.md"): README[:5]}
FRONT_HEADS = ("measured", "shmload", "compared with")
PLAIN_NAMES = {  # name of a case in a benchmark -> its name on pages of FRONT
    "torch_inline": "torch without workers",
    "torch_getitems": "torch with batched reads",
    "Threads": "a thread pool",
    "threads": "a thread pool",
    "stop-watch": "the measurement itself",
}
HEADS = ("measured", "now", "beside it", "aim", "", "before", "now / before", "better is", "")


@dataclass(frozen=True)
class Line:
    """A row over all rounds, together with the earlier tree's row.

    Attributes:
        row: the row of the round with the median figure, so that all its texts are from the same round.
        before: the median of the earlier tree; None if it has no such row.
        ratio: this tree's figure over the earlier tree's, within rounds; None without an earlier row.
        word: `better`, `worse` or `same`; empty if the row is not judged.
        spread: the spread of the figure over rounds; None if there was only one round.
    """

    row: Row
    before: float | None
    ratio: Spread | None
    word: str
    spread: Spread | None = None

    @property
    def figure(self) -> str:
        return figure(self.row) + (f" ({self.spread.low:.3g} to {self.spread.high:.3g})" if self.spread else "")

    @property
    def figure_before(self) -> str:
        return "-" if self.before is None else f"{self.before:.3g} {self.row.unit}".strip()

    @property
    def change(self) -> str:
        return f"{self.ratio.median:.3g} ({self.ratio.low:.3g} to {self.ratio.high:.3g})" if self.ratio else "-"

    @property
    def better_is(self) -> str:
        return {"<": "less", ">": "more"}.get(self.row.aim[:1], "-")

    def cells(self) -> tuple[str, ...]:
        """Returns the cells under HEADS."""
        met = "met" if self.row.met else "missed"
        beside = self.row.what, self.figure, self.row.beside, self.row.aim, met
        return (*beside, self.figure_before, self.change, self.better_is, self.word)


Lines = Mapping[str, Sequence[Line]]  # by benchmark


def write_pages(
    conditions: Mapping[str, Any], lines: Lines, notes: Mapping[str, str], root: Path = ROOT, *, is_whole: bool = True
) -> None:
    """Writes the figures of a run into all pages.

    Args:
        notes: benchmark -> the reason why it has no rows in this tree or the earlier one.
        is_whole: whether the run has all benchmarks. If it does not, other sections are kept, and those of this run name it.
    Raises:
        SystemExit: a row of FRONT is missing, or a page has no place for it; then nothing is written.
    """
    texts = {path: (root / path).read_text() for path in (PAGE, *FRONT)}
    page = measurements(conditions, lines, notes, "" if is_whole else between(texts[PAGE]))
    written = {PAGE: page, **{path: front(path, page) for path in FRONT}}
    filled = {path: fill(path, text, written[path]) for path, text in texts.items()}
    for path, text in filled.items():
        (root / path).write_text(text)


def fill(path: Path, page: str, text: str) -> str:
    """Returns the page with another text between its marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path}: needs a line {BEGIN.strip()} and after it a line {END.strip()}")
    return f"{head}{begin}{text}{end}{tail}"


def between(page: str) -> str:
    """Returns the text between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def sections_of(page: str) -> dict[str, str]:
    """Returns a dict: benchmark -> the text below its heading."""
    parts = (part.partition("\n") for part in page.split("\n## ")[1:])
    return {name: text.strip() for name, _, text in parts}


def cells_of(text: str) -> list[list[str]]:
    """Returns the cells of each row of a table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def front(path: Path, page: str) -> str:
    """Returns the text of a page of FRONT, made from the page of measurements: the run that most rows are from, and the table.

    Rows of other runs are dated.
    """
    sections = sections_of(page)
    found = {(name, cells[0]): cells for name, text in sections.items() for cells in cells_of(text)}
    if missing := [f"{name}: {what}" for _, name, what in FRONT[path] if (name, what) not in found]:
        raise SystemExit(f"{path}: the run has no row {'; '.join(missing)}; nothing is written")
    whole, _, _ = page.partition("\n")
    of_section = re.compile(rf"^{MEASURED} .*", re.MULTILINE)
    runs = {name: line[0] if (line := of_section.search(text)) else whole for name, text in sections.items()}
    run, _ = Counter(runs[name] for _, name, _ in FRONT[path]).most_common(1)[0]
    rows = []
    for words, name, what in FRONT[path]:
        day = runs[name].removeprefix(MEASURED).split()[0]
        rows.append((words if runs[name] == run else f"{words} ({day})", found[name, what][1], plain(found[name, what][2])))
    return f"{run}\n\n{table(FRONT_HEADS, rows)}"


def plain(beside: str) -> str:
    """Returns a row's text about the other cases with their plain names, and without shmload, which has its own column."""
    for name, words in PLAIN_NAMES.items():
        beside = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words, beside)
    return re.sub(r"^shmload [\d.,]+, ", "", beside)


def when(conditions: Mapping[str, Any]) -> str:
    """Returns the line that identifies the run; the same on all pages."""
    return (
        f"{MEASURED} {conditions['started']} at commit {conditions['now']}: {conditions['num_cpus']} cores, 2 workers, "
        f"torch {conditions['torch']}."
    )


def where(conditions: Mapping[str, Any]) -> str:
    """Returns the line about the machine and the method."""
    return (
        f"{conditions['cpu_model']}, {conditions['architecture']}, Linux {conditions['kernel']}, Python {conditions['python']}, "
        f"numpy {conditions['numpy']}; load {conditions['load']} when it began. {conditions['rounds']} rounds, timed parts of "
        f"{conditions['seconds']:g} s. Before is {conditions['before']}."
    )


def measurements(conditions: Mapping[str, Any], lines: Lines, notes: Mapping[str, str], page: str) -> str:
    """Returns the page's sections: the conditions, the changes, and a table per benchmark.

    Args:
        page: the text of an earlier run, whose other sections are kept; empty without one.
    """
    run = [when(conditions), where(conditions)]
    head, sections = page.split("\n\n")[:2] if page else [*run], sections_of(page)
    for name in dict.fromkeys((*lines, *notes)):
        parts = [question(name), *(run if page else ())]
        parts += [table(HEADS, [line.cells() for line in lines[name]]).rstrip()] if lines.get(name) else []
        sections[name] = "\n\n".join(parts + ([notes[name]] if name in notes else []))
    rows = [(name, cells[0], cells[4], cells[8]) for name, text in sections.items() for cells in cells_of(text)]
    worse, better = ([row[:2] for row in rows if row[3] == word] for word in ("worse", "better"))
    met, missed = ([row[:2] for row in rows if row[2] == word] for word in ("met", "missed"))  # a withdrawn row is in neither
    head.append(f"**Worse** beyond noise than before:{listed(worse)}")
    num_better = ", ".join(f"{name} ({count})" for name, count in Counter(name for name, _ in better).most_common())
    head.append(f"**Better** beyond noise than before: {f'rows of {num_better}' if better else 'nothing'}.")
    head.append(f"**Aims** met: {len(met)} of {len(met) + len(missed)}. Missed:{listed(missed)}")
    return "\n\n".join(head + [f"## {name}\n\n{text}" for name, text in sections.items()]) + "\n"


def listed(rows: Sequence[tuple[str, str]]) -> str:
    """Returns (benchmark, row) pairs as a list with an item per benchmark."""
    found = {name: [what for each, what in rows if each == name] for name, _ in rows}
    return "\n\n" + "\n".join(f"* {name}: {'; '.join(all_of)}" for name, all_of in found.items()) if found else " nothing."


def question(name: str) -> str:
    """Returns the first paragraph of a benchmark's docstring, which states what it measures."""
    path = Path(__file__).with_name(f"{name}.py")
    text = (ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    head, *body = (f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)
    return f"{head}|{'---|' * len(heads)}\n{''.join(body)}"
