"""A hook of mkdocs that adds pages to those of docs/ and redirects links.

On a forge, docs/ is read as files, so its links lead to files. In the site, pages of the repository's root are part of it, and links
to any other file lead to the forge.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {name: name.lower() for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")}
_FENCE_OR_LINK = re.compile(r"^```.*?^```$|(\[\w+\.md)?\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, uri in ROOT_PAGES.items():
        file = File.generated(config, uri, content=(ROOT / name).read_text())
        file.edit_uri = f"../{name}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links of the site."""
    here = normpath(join("docs", page.file.edit_uri or page.file.src_uri))

    def led(found: re.Match[str]) -> str:
        name, target, anchor = found.groups(default="")
        if not target:
            return found[0]
        there = normpath(join(dirname(here), target))
        if there in ROOT_PAGES:
            uri = ROOT_PAGES[there] + anchor
        elif there.startswith("docs/"):
            uri = there.removeprefix("docs/") + anchor
        else:
            return f"{name}]({config.repo_url}/blob/main/{there}{anchor})"
        file = files.src_uris.get(uri.partition("#")[0]) if name else None
        if file and file.page:
            name = f"[{file.page.title}"  # in place of the file's name
        return f"{name}]({relpath(uri, dirname(page.file.src_uri))})"

    return _FENCE_OR_LINK.sub(led, markdown)


def on_post_page(output: str, **_: object) -> str:
    """Removes the attribute that makes the theme's script ask GitHub for the number of stars: pages load nothing from other
    hosts.
    """
    return output.replace(' data-md-component="source"', "")


def on_post_template(output: str, **_: object) -> str:
    """Does the same for the 404 page."""
    return on_post_page(output)
