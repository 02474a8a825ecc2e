# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it builds without a warning, holds every page and public name, and needs no network."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rmq

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """What a page offers and what it leads to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(Path(rmq.__file__).parents[1]), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory], cwd=ROOT,
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nmkdocs comes with: pip install -e '.[docs]'"
    assert "WARNING" not in done.stderr
    return directory


@pytest.fixture(scope="module")
def html(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_in_the_navigation() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    listed = re.findall(r"([\w/-]+\.md)", navigation.partition("\n\n")[0])
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "CHANGELOG.md", "CONTRIBUTING.md"])


def test_links_lead_somewhere(site: Path, html: dict[str, Page]) -> None:
    faults = []
    for name, page in html.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) \
                if parts.path not in ("", ".") else name  # fmt: skip
            anchors = html[target].ids if target in html else set()
            if not (site / target).is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                faults.append(f"{name}: {link}")
    assert faults == []


def test_nothing_is_loaded_from_the_network(html: dict[str, Page]) -> None:
    loaded = {f"{name}: {source}" for name, page in html.items() for source in page.loaded}
    assert loaded
    assert [source for source in sorted(loaded) if "//" in source] == []


def test_reference_has_every_public_name(html: dict[str, Page]) -> None:
    shown = {name for path, page in html.items() if path.startswith("reference/") for name in page.ids}
    assert {f"rmq.{name}" for name in rmq.__all__} - shown == set()
    methods = {name for name in dir(rmq.Store) if not name.startswith("_") and callable(getattr(rmq.Store, name))}
    assert {f"rmq.Store.{name}" for name in methods} - shown == set()
    assert {name for name in shown if "._" in name} == {"rmq.__version__"}


def test_reference_has_the_signatures_of_compiled_code(site: Path) -> None:
    putting = re.sub(r"<[^>]+>", "", (site / "reference" / "putting.html").read_text(encoding="utf-8"))
    assert re.search(r"Message\(\s*topic: str,\s*body: \w+,\s*\*,\s*keys: ", putting)
    assert "A message to put." in putting


def test_linked_source_is_a_page(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "source" / "examples" / "ingest.py.html").read_text(encoding="utf-8"))
    assert "SPDX-License-Identifier" in page
