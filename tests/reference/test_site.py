"""The site builds without a warning, is complete, and requests nothing from other hosts; its pages look as on a forge."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

pytest.importorskip("material", reason="the extra docs is not installed")
from markdown import Markdown
from mkdocs.config import load_config

from tests.reference.site import ROOT, ROOT_PAGES, on_page_markdown

pytestmark = [
    pytest.mark.slow(reason="builds the whole site"),
    pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="an installed package is being tested"),
]

REPOSITORY = "https://github.com/shmload/shmload"
DOCS = ROOT / "docs"
FILES = sorted(DOCS.rglob("*.md"))
PAGES = {
    *(f"{path.relative_to(DOCS).with_suffix('')}/".removesuffix("index/") for path in FILES),
    *(f"{uri.removesuffix('.md')}/" for uri in ROOT_PAGES.values()),
}
BLOCKS = re.compile(r"<(h\d|ul|ol|li|table|tr|td|th|pre|blockquote|code|em|strong|img)\b")
IN_A_STYLE = re.compile(r"(?:url\(|@import )\s*[\"']?(?!data:|#)([^\"')]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # disables the theme's notice about its successor
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_exists_and_is_searchable(site: Path) -> None:
    assert {str(path.parent.relative_to(site)) + "/" for path in site.rglob("index.html")} == PAGES - {""} | {"./"}
    entries = {entry["location"]: entry["text"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]}
    assert {location.partition("#")[0] for location in entries} == PAGES
    assert "snapshot_every_n_steps" in entries["api/loader/#shmloader-reproducibility-and-ranks"]


def test_nothing_comes_from_another_host(site: Path) -> None:
    loaded = {place for page in site.rglob("*.html") for place in FetchedResources.by(page.read_text())}
    loaded |= {place for style in site.rglob("*.css") for place in IN_A_STYLE.findall(style.read_text())}
    assert len(loaded) > 10
    assert [place for place in loaded if urlsplit(place).netloc] == []
    # the theme's script looks for these to ask for a repository's stars and to load diagrams
    assert [
        page for page in site.rglob("*.html") for sign in ('component="source"', 'class="mermaid"') if sign in page.read_text()
    ] == []


def test_resources_loaded_by_a_page_are_found() -> None:
    page = '<link href="//a/x"><script src="https://b"></script><img srcset="c 2x, d"><a href="https://e"></a><style>p{background:url(f)}</style>'
    assert list(FetchedResources.by(page)) == ["//a/x", "https://b", "c", "d", "f"]


def test_links_to_files_that_are_not_pages_lead_to_the_forge(site: Path) -> None:
    led = {
        path
        for page in site.rglob("*.html")
        for path in re.findall(rf'"{REPOSITORY}/(?:blob|edit)/main/([^"]*)"', page.read_text())
    }
    assert {"examples/ddp.py", "docs/switch.md", "ARCHITECTURE.md"} <= led
    assert {path for path in led if not (ROOT / path).exists()} == set()


def test_link_text_with_a_file_name_becomes_the_page_title(site: Path) -> None:
    assert '">The first hour</a>' in (site / "index.html").read_text()
    assert not re.search(r">\w+\.md</a>", (site / "index.html").read_text())


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("switch.md", "resume.md#which-mode", "resume.md#which-mode"),
        ("switch.md", "#checklist", "#checklist"),
        ("switch.md", "https://pytorch.org/x.md", "https://pytorch.org/x.md"),
        ("switch.md", "../examples/ddp.py", f"{REPOSITORY}/blob/main/examples/ddp.py"),
        ("switch.md", "../ARCHITECTURE.md#a-batchs-way", "architecture.md#a-batchs-way"),
        ("switch.md", "api/loader.md#shmloader", "api/loader.md#shmloader"),
        ("api/loader.md", "../switch.md", "../switch.md"),
        ("architecture.md", "docs/house.svg", "house.svg"),
        ("architecture.md", "LICENSE", f"{REPOSITORY}/blob/main/LICENSE"),
    ],
)
def test_link_leads_to_its_files_page_in_the_site(page: str, link: str, wanted: str) -> None:
    edited = next((f"../{name}" for name, uri in ROOT_PAGES.items() if uri == page), page)
    file = SimpleNamespace(src_uri=page, edit_uri=edited)
    text = "[a]({}) ![b]({})\n```\n[c](../examples/ddp.py)\n```\n"
    config = SimpleNamespace(repo_url=REPOSITORY)
    assert on_page_markdown(text.format(link, link), page=SimpleNamespace(file=file), config=config, files=None) == text.format(
        wanted, wanted
    )


@pytest.fixture(scope="module")
def site_markdown() -> Markdown:
    config = load_config(str(ROOT / "mkdocs.yml"))
    return Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)


@pytest.mark.parametrize("name", [*(str(path.relative_to(ROOT)) for path in FILES), *ROOT_PAGES])
def test_page_has_the_same_blocks_as_on_a_forge(name: str, site_markdown: Markdown) -> None:
    """Python-Markdown shows some blocks as text that a forge shows as blocks, e.g. a list without an empty line before it."""
    text = (ROOT / name).read_text()
    on_a_forge = MarkdownIt("commonmark").enable("table").render(text)
    assert Counter(BLOCKS.findall(site_markdown.reset().convert(text))) == Counter(BLOCKS.findall(on_a_forge))


class FetchedResources(HTMLParser):
    """Collects what a browser fetches for a page: scripts, styles, fonts, images; not the targets of links."""

    @classmethod
    def by(cls, text: str) -> list[str]:
        parser = cls()
        parser.places = []
        parser.feed(text)
        return parser.places + [
            place for style in re.findall(r"<style.*?</style>", text, re.DOTALL) for place in IN_A_STYLE.findall(style)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.places.append(found["href"] or "")
        self.places += [found["src"] or ""] if "src" in found else []
        self.places += [place.split()[0] for place in (found.get("srcset") or "").split(",") if place]
