# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: links from docs/ to files of the repository outside it.

On such a link the file becomes a page of the site: Markdown as it is, source as one code block. So the pages keep the
links that work in the repository, and the site needs no network for them. README.md is the site's index.md.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LANGUAGES = {".py": "python", ".pyi": "python", ".pyx": "cython", ".pxd": "cython", ".h": "c", ".sh": "bash",
             ".toml": "toml", ".yml": "yaml", ".java": "java", ".json": "json"}  # fmt: skip
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.M | re.S)
LINK = re.compile(r"(?<!!)(\[[^\]\n]*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's own pages, and a page for each file that some page links to."""
    root = _root(config)
    for name in PAGES:
        files.append(File.generated(config, name, content=(root / name).read_text(encoding="utf-8")))
    pages = list(files.documentation_pages())
    for page in pages:  # grows
        for link in LINK.finditer(FENCE.sub("", page.content_string)):
            path = _path(root, page, link[2])
            if path is not None and _page_of(path) not in files.src_uris:
                file = File.generated(config, _page_of(path), content=_as_page(root, path),
                                      inclusion=InclusionLevel.NOT_IN_NAV)  # fmt: skip
                files.append(file)
                pages.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the pages of those files."""
    root, here = _root(config), posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = _path(root, page.file, match[2])
        if path is None:
            return match[0]
        return f"{match[1]}({posixpath.relpath(_page_of(path), here or '.')}{match[3] or ''})"

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(lead, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(lead, markdown[at:])])


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _path(root: Path, page: File, target: str) -> str | None:
    """The file of the repository that a link means, from the root; None for what mkdocs itself follows."""
    if ":" in target or target.startswith("/"):
        return None
    home = f"docs/{page.src_uri}" if page.generated_by is None else page.src_uri.removeprefix("source/")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
    if home.startswith("docs/") and path.startswith("docs/"):
        return None
    return path if (root / path).is_file() else None


def _page_of(path: str) -> str:
    """Name of a file's page in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in PAGES else f"source/{path}{'' if path.endswith('.md') else '.md'}"


def _as_page(root: Path, path: str) -> str:
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    head = f"---\nhide: [toc]\n---\n# {posixpath.basename(path)}\n\n`{path}`\n\n"
    return f"{head}``````{language}\n{text.rstrip()}\n``````\n"
