"""Writes the API reference, docs/api/, from the docstrings and the commands' own help.

    python -m tests.reference

`tests/reference/test_reference.py` fails when what is committed is not what this writes, or when something public is not described.
A framework would bring its own markup and a site to keep; these pages are read where the others are, in Markdown.
"""

from __future__ import annotations

from tests.reference.pages import FOLDER, pages


def main() -> None:
    """The command."""
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
