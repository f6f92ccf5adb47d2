"""Writes the pages of the API reference, docs/api/*.md, from the docstrings: `python -m tests.reference`."""

from tests.reference.pages import FOLDER, pages

FOLDER.mkdir(exist_ok=True)
for old in FOLDER.glob("*.md"):
    old.unlink()
for name, text in pages().items():
    (FOLDER / name).write_text(text)
